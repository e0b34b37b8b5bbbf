//! Checkpoints that cannot be converted: the source stays as it is and no folder appears.

use std::fs;
use std::path::PathBuf;

use safetensors::tensor::{serialize_to_file, Dtype, TensorView};
use safetensors::SafeTensors;

use super::{byte_tokenizer, copy_folder, edit_json, fixture, refused, snapshot, text, wick};

/// A copy of a fixture, and where its conversion would go.
pub(super) struct Place {
    pub(super) root: tempfile::TempDir,
    pub(super) source: PathBuf,
    pub(super) out: PathBuf,
}

impl Place {
    pub(super) fn of(name: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let (source, out) = (root.path().join("source"), root.path().join("out"));
        copy_folder(&fixture(name), &source);
        Self { root, source, out }
    }

    pub(super) fn refuses(&self, parts: &[&str]) {
        let before = snapshot(&self.source);
        refused(
            &["convert", text(&self.source), text(&self.out), "--quiet"],
            parts,
        );
        assert!(
            snapshot(&self.source) == before,
            "the source changed: {parts:?}"
        );
        assert!(!self.out.exists(), "something was written: {parts:?}");
    }

    /// Writes the single weight file anew, each tensor as `change` says: another dtype and bytes, or none.
    pub(super) fn rewrite(
        &self,
        change: impl Fn(&str, &TensorView<'_>) -> Option<(Dtype, Vec<u8>)>,
    ) {
        let path = self.source.join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let kept: Vec<(String, Vec<usize>, Dtype, Vec<u8>)> = tensors
            .iter()
            .filter_map(|(name, view)| {
                let (dtype, data) = change(name, &view)?;
                Some((name.to_owned(), view.shape().to_vec(), dtype, data))
            })
            .collect();
        let views = kept.iter().map(|(name, shape, dtype, data)| {
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        serialize_to_file(views, None, &path).unwrap();
    }
}

#[test]
fn truncated_shards() {
    let shard = "model-00002-of-00002.safetensors";
    for cut in [1, 4096, 90_000, 180_343] {
        let place = Place::of("llama-relu-gqa-f16");
        let path = place.source.join(shard);
        let bytes = fs::read(&path).unwrap();
        let left = bytes.len() - cut;
        fs::write(&path, &bytes[..left]).unwrap();
        place.refuses(&[shard, &left.to_string()]);
    }
    let place = Place::of("opt-pre-ln");
    fs::write(place.source.join("model.safetensors"), b"").unwrap();
    place.refuses(&["model.safetensors", "0 bytes"]);
}

#[test]
fn headers_that_lie() {
    for length in [1u64 << 60, u64::MAX, 0] {
        let place = Place::of("opt-pre-ln");
        let path = place.source.join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        let shown = length.to_string();
        place.refuses(&["model.safetensors", if length == 0 { "" } else { &shown }]);
    }
}

#[test]
fn git_lfs_pointers() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 721088\n";
    for file in ["model.safetensors", "config.json", "tokenizer.json"] {
        let place = Place::of("opt-pre-ln");
        fs::write(place.source.join(file), pointer).unwrap();
        place.refuses(&[file, "git-lfs pointer"]);
    }
}

#[test]
fn missing_files() {
    let shard = "model-00001-of-00002.safetensors";
    let place = Place::of("llama-relu-gqa-f16");
    fs::remove_file(place.source.join(shard)).unwrap();
    place.refuses(&["1 of 2", shard]);

    let place = Place::of("opt-pre-ln");
    fs::rename(
        place.source.join("model.safetensors"),
        place.source.join("pytorch_model.bin"),
    )
    .unwrap();
    place.refuses(&["pytorch_model.bin", "torch.save"]);

    let place = Place::of("opt-pre-ln");
    fs::remove_file(place.source.join("config.json")).unwrap();
    place.refuses(&["config.json"]);

    let place = Place::of("opt-pre-ln");
    let nowhere = place.root.path().join("nowhere");
    refused(
        &["convert", text(&nowhere), text(&place.out)],
        &[text(&nowhere), "does not exist"],
    );
}

#[test]
fn missing_tensors_and_other_dtypes() {
    let wanted = "model.layers.1.mlp.up_proj.weight";
    let place = Place::of("llama-2-silu");
    place.rewrite(|name, view| (name != wanted).then(|| (view.dtype(), view.data().to_vec())));
    place.refuses(&["1 of", wanted]);

    // Thousands of missing tensors are counted, not listed.
    let place = Place::of("opt-pre-ln");
    edit_json(&place.source.join("config.json"), |config| {
        config["num_hidden_layers"] = 4000.into()
    });
    place.refuses(&["tensors missing", "model.decoder.layers.3.", "more"]);

    for name in [wanted, "model.norm.weight"] {
        let place = Place::of("llama-2-silu");
        place.rewrite(|each, view| {
            let wide = || (Dtype::I64, vec![0; 2 * view.data().len()]);
            Some(if each == name {
                wide()
            } else {
                (view.dtype(), view.data().to_vec())
            })
        });
        place.refuses(&["model.safetensors", name, "I64"]);
    }
}

#[test]
fn unknown_architectures() {
    for (value, part) in [("gpt2", "`gpt2`"), ("\u{1b}[31mred\nline", "line")] {
        let place = Place::of("opt-pre-ln");
        edit_json(&place.source.join("config.json"), |config| {
            config["model_type"] = value.into()
        });
        place.refuses(&[part, "not supported", "llama", "opt"]);
    }
}

#[test]
fn folders_that_are_not_ours() {
    let place = Place::of("opt-pre-ln");
    fs::create_dir(&place.out).unwrap();
    fs::write(place.out.join("thesis.txt"), "years of work").unwrap();
    let before = snapshot(&place.out);
    let convert =
        |out: &str, parts: &[&str]| refused(&["convert", text(&place.source), out], parts);
    convert(text(&place.out), &[text(&place.out), "thesis.txt"]);
    assert!(snapshot(&place.out) == before);

    let file = place.root.path().join("file");
    fs::write(&file, "x").unwrap();
    convert(text(&file), &[text(&file), "not a folder"]);
    assert_eq!(fs::read(&file).unwrap(), b"x");

    let sources = snapshot(&place.source);
    let inside = place.source.join("deep/er");
    convert(text(&place.source), &[text(&place.source), "source folder"]);
    convert(text(&inside), &[text(&inside), "source folder"]);
    assert!(snapshot(&place.source) == sources && !place.source.join("deep").exists());
}

#[test]
fn a_finished_folder_is_not_written_over() {
    let place = Place::of("opt-pre-ln");
    let other = Place::of("llama-2-silu");
    let convert = ["convert", text(&place.source), text(&place.out), "--quiet"];
    wick(&convert, b"").is_success("convert");
    let before = snapshot(&place.out);
    refused(
        &["convert", text(&other.source), text(&place.out)],
        &[text(&place.out), "another checkpoint"],
    );
    let half = [
        "convert",
        text(&place.source),
        text(&place.out),
        "--dtype",
        "f16",
    ];
    refused(&half, &[text(&place.out), "other options"]);
    wick(&convert, b"").is_success("the same again");
    assert!(snapshot(&place.out) == before);
    // Not a folder of this version: not taken for one of another checkpoint either.
    edit_json(&place.out.join("wick.json"), |manifest| {
        manifest["format_version"] = 2.into()
    });
    refused(&convert, &["wick.json", "version 2"]);
}

/// It is copied as it is, and the model is worth something without it.
#[test]
fn tokenizers_that_cannot_be_read_are_told_at_once() {
    for (json, is_good) in [
        ("", false),
        ("{}", false),
        (byte_tokenizer().as_str(), true),
    ] {
        let place = Place::of("opt-pre-ln");
        fs::write(place.source.join("tokenizer.json"), json).unwrap();
        let said = wick(&["convert", text(&place.source), text(&place.out)], b"");
        said.is_success("convert");
        assert_eq!(said.stdout.contains("tokenizer.json"), !is_good, "{json}");
        let copied = fs::read_to_string(place.out.join("tokenizer.json")).unwrap();
        assert_eq!(copied, json);
    }
}
