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
    let width = a.width();
    let rows_together = (PIECE_BYTES / 4).checked_div(width).unwrap_or(1).max(1);
    let (mut a_values, mut b_values) = (Vec::new(), Vec::new());
    for start in (0..a.rows()).step_by(rows_together) {
        let rows = start..(start + rows_together).min(a.rows());
        for (tensor, values) in [(a, &mut a_values), (b, &mut b_values)] {
            values.resize(rows.len() * width * 4, 0);
            // As f32 every stored value is itself.
            source.read(tensor, rows.clone(), 0..width, Dtype::F32, values)?;
            source.release(tensor, rows.clone());
        }
        if a_values != b_values {
            return Ok(false);
        }
    }
    Ok(true)
}
