//! The output head: a matrix of its own, or the token embedding again.
//!
//! | config says | head stored | then |
//! |---|---|---|
//! | tied | no | tied |
//! | tied | same as the embedding | tied, the copy is dropped |
//! | tied | differs | own head, the copied config says so (as transformers does) |
//! | own | yes | own head |
//! | own | no | tied, the copied config says so |

use wick_format::Dtype;

use crate::family::ModelSpec;
use crate::source::{SourceFolder, SourceTensor};
use crate::transcode::widen;
use crate::ConvertError;

/// Bytes compared before memory is let go.
const PIECE_BYTES: usize = 4 << 20;

/// What becomes of the head.
pub(crate) struct HeadChoice {
    /// Whether the stored head is kept.
    pub(crate) keep: bool,
    /// `tie_word_embeddings` for the copied config, when it must change.
    pub(crate) tied_edit: Option<bool>,
    /// A sentence for the user.
    pub(crate) note: Option<String>,
}

/// Decides by the config and by what is stored.
pub(crate) fn choose(spec: &ModelSpec, source: &SourceFolder) -> Result<HeadChoice, ConvertError> {
    let head_name = &spec.head.name;
    let embedding_name = &spec.embedding;
    let choice = |keep, tied_edit, note: Option<String>| HeadChoice {
        keep,
        tied_edit,
        note,
    };
    match (spec.tied, source.get(head_name), source.get(embedding_name)) {
        (true, None, _) | (true, Some(_), None) => Ok(choice(false, None, None)),
        (true, Some(head), Some(embedding)) if same_values(source, head, embedding)? => {
            let note = format!("{head_name} repeats {embedding_name} and is stored once");
            Ok(choice(false, None, Some(note)))
        }
        (true, Some(_), Some(_)) => {
            let note = format!(
                "{head_name} differs from {embedding_name} although config.json ties them: kept \
                 as a head of its own (tie_word_embeddings is false in the copied config.json)"
            );
            Ok(choice(true, Some(false), Some(note)))
        }
        (false, Some(_), _) => Ok(choice(true, None, None)),
        (false, None, _) => {
            let note = format!(
                "config.json does not tie the embeddings, but there is no {head_name}: \
                 {embedding_name} is used (tie_word_embeddings is true in the copied config.json)"
            );
            Ok(choice(false, Some(true), Some(note)))
        }
    }
}

/// Whether two tensors hold the same numbers, whatever their dtypes.
fn same_values(
    source: &SourceFolder,
    a: &SourceTensor,
    b: &SourceTensor,
) -> Result<bool, ConvertError> {
    if a.shape != b.shape {
        return Ok(false);
    }
    let (a_dtype, b_dtype) = (source.dtype(a)?, source.dtype(b)?);
    let (a_bytes, b_bytes) = (source.bytes(a), source.bytes(b));
    let piece = PIECE_BYTES / 4;
    let elements = a_bytes.len() / a_dtype.size_bytes();
    for start in (0..elements).step_by(piece) {
        let range = start..(start + piece).min(elements);
        let scaled =
            |dtype: Dtype| range.start * dtype.size_bytes()..range.end * dtype.size_bytes();
        let (a_range, b_range) = (scaled(a_dtype), scaled(b_dtype));
        let (a_piece, b_piece) = (&a_bytes[a_range.clone()], &b_bytes[b_range.clone()]);
        let same = if a_dtype == b_dtype {
            a_piece == b_piece
        } else {
            same_widened((a_dtype, a_piece), (b_dtype, b_piece))
        };
        source.release(a, a_range);
        source.release(b, b_range);
        if !same {
            return Ok(false);
        }
    }
    Ok(true)
}

fn same_widened(a: (Dtype, &[u8]), b: (Dtype, &[u8])) -> bool {
    const LANES: usize = 256;
    let (mut a_values, mut b_values) = ([0f32; LANES], [0f32; LANES]);
    let pieces =
        a.1.chunks(LANES * a.0.size_bytes())
            .zip(b.1.chunks(LANES * b.0.size_bytes()));
    for (a_bytes, b_bytes) in pieces {
        let len = a_bytes.len() / a.0.size_bytes();
        widen(a.0, a_bytes, &mut a_values[..len]);
        widen(b.0, b_bytes, &mut b_values[..len]);
        if a_values[..len] != b_values[..len] {
            return false;
        }
    }
    true
}
