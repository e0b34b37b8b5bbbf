//! Traces as strangers write them: each rule of the form is broken once, and refused in a sentence with the file and
//! the tensor.

use std::io::Write;

use proptest::prelude::*;
use wick_format::FileLayout;

use super::*;

/// A trace of two layers and three tokens, before it is a file.
struct Draft {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, Vec<u32>)>,
}

impl Draft {
    fn new() -> Self {
        let metadata = TraceMetadata {
            model_type: "opt".to_owned(),
            model_hash: "0123456789abcdef".to_owned(),
            selector: "oracle".to_owned(),
            is_replayed: false,
            sequence_tokens: 512,
        };
        let vectors: [(&str, &[u32]); 6] = [
            ("layers.0.counts", &[2, 0, 1, 1]),
            ("layers.0.offsets", &[0, 2, 2, 4]),
            ("layers.0.neurons", &[0, 2, 0, 3]),
            ("layers.1.counts", &[0, 1]),
            ("layers.1.offsets", &[0, 0, 1, 1]),
            ("layers.1.neurons", &[1]),
        ];
        Self {
            metadata: metadata.to_map(),
            tensors: vectors
                .iter()
                .map(|(name, values)| ((*name).to_owned(), values.to_vec()))
                .collect(),
        }
    }

    fn with(mut self, name: &str, values: &[u32]) -> Self {
        self.tensors.retain(|tensor| tensor.0 != name);
        self.tensors.push((name.to_owned(), values.to_vec()));
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.0 != name);
        self
    }

    fn saying(mut self, key: &str, value: Option<&str>) -> Self {
        self.metadata.remove(key);
        let value = value.map(|value| (key.to_owned(), value.to_owned()));
        self.metadata.extend(value);
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let specs = self
            .tensors
            .iter()
            .map(|(name, values)| TensorSpec::new(name, StoredDtype::U32, &[values.len()]));
        let layout = FileLayout::new(&specs.collect::<Vec<_>>(), &self.metadata).unwrap();
        let mut bytes = layout.header_bytes().to_vec();
        let values = self.tensors.iter().flat_map(|tensor| &tensor.1);
        values.for_each(|value| bytes.extend(value.to_le_bytes()));
        bytes
    }
}

/// Reads all layers of a trace of these bytes.
fn read(bytes: &[u8]) -> std::result::Result<Vec<LayerTrace>, String> {
    let mut file = tempfile::NamedTempFile::with_suffix(".trace").unwrap();
    file.write_all(bytes).unwrap();
    let read = || {
        let trace = RecordedTrace::open(file.path())?;
        (0..trace.intermediate_sizes().len())
            .map(|layer| trace.layer(layer))
            .collect::<Result<Vec<_>>>()
    };
    read().map_err(|error| {
        let said = error.to_string();
        assert!(said.contains(file.path().to_str().unwrap()), "{said}");
        assert!(!said.contains('\n'), "{said}");
        said
    })
}

fn refused(draft: &Draft, parts: &[&str]) {
    let said = read(&draft.bytes()).unwrap_err();
    assert!(parts.iter().all(|part| said.contains(part)), "{said}");
}

#[test]
fn a_sound_trace_is_read() {
    let layers = read(&Draft::new().bytes()).unwrap();
    assert_eq!(layers[0].neurons(2), [0, 3]);
    assert_eq!(layers[1].iter().map(<[u32]>::len).sum::<usize>(), 1);
    // No tokens at all.
    let draft = Draft::new()
        .without("layers.1.counts")
        .without("layers.1.offsets")
        .without("layers.1.neurons")
        .with("layers.0.counts", &[0; 4])
        .with("layers.0.offsets", &[0])
        .with("layers.0.neurons", &[]);
    assert_eq!(read(&draft.bytes()).unwrap()[0].tokens(), 0);
}

#[test]
fn broken_vectors_are_refused() {
    let offsets: [(&[u32], &str); 5] = [
        (&[1, 2, 2, 4], "starts at 1"),
        (&[0, 3, 2, 4], "token 1 ends at 2"),
        (&[0, 2, 2, 5], "ends at 5, there are 4"),
        (&[0, 2, 2, 3], "ends at 3, there are 4"),
        (&[0, 2, 2, u32::MAX], "ends at 4294967295"),
    ];
    for (values, part) in offsets {
        let name = "layers.0.offsets";
        refused(&Draft::new().with(name, values), &[name, part]);
    }
    let neurons: [(&[u32], &str); 4] = [
        (&[2, 0, 0, 3], "token 0 has 0 after 2"),
        (&[0, 0, 0, 3], "token 0 has 0 after 0"),
        (&[0, 2, 0, 4], "token 2 has neuron 4, the layer has 4"),
        (&[0, 2, 0, u32::MAX], "token 2 has neuron 4294967295"),
    ];
    for (values, part) in neurons {
        let name = "layers.0.neurons";
        refused(&Draft::new().with(name, values), &[name, part]);
    }
    let counts = "layers.0.counts";
    let lied = Draft::new().with(counts, &[2, 0, 1, 2]);
    refused(&lied, &[counts, "neuron 3", "2 tokens", "the 1 that"]);
    let narrow = Draft::new().with(counts, &[2, 0, 1]);
    refused(&narrow, &["layers.0.neurons", "neuron 3, the layer has 3"]);
    let none = Draft::new().with("layers.1.counts", &[]);
    refused(&none, &["layers.1.neurons", "the layer has 0"]);
}

#[test]
fn missing_and_odd_tensors_are_refused() {
    for name in ["layers.0.counts", "layers.0.offsets", "layers.1.neurons"] {
        // Five tensors are one layer and a rest, six with a stranger.
        refused(&Draft::new().without(name), &["tensor"]);
        refused(
            &Draft::new().without(name).with("x", &[1]),
            &[name, "missing"],
        );
    }
    refused(&Draft::new().with("x", &[1]), &["7 tensors"]);
    let uneven = Draft::new().with("layers.1.offsets", &[0, 0, 1]);
    refused(&uneven, &["layers.1.offsets", "3 values", "expected 4"]);
    let none = Draft::new().with("layers.0.offsets", &[]);
    refused(&none, &["layers.0.offsets", "0 values"]);
    let empty = Draft {
        tensors: Vec::new(),
        ..Draft::new()
    };
    refused(&empty, &["0 tensors"]);
    for (old, new) in [
        (
            "\"dtype\":\"U32\",\"shape\":[1]",
            "\"dtype\":\"F32\",\"shape\":[1]",
        ),
        ("\"shape\":[1]", "\"shape\":[ ]"),
    ] {
        let bytes = Draft::new().bytes();
        let at = bytes.windows(old.len()).position(|at| at == old.as_bytes());
        let mut edited = bytes.clone();
        edited[at.unwrap()..][..old.len()].copy_from_slice(new.as_bytes());
        let said = read(&edited).unwrap_err();
        assert!(
            said.contains("layers.1.neurons") && said.contains("vector of U32"),
            "{said}"
        );
    }
}

#[test]
fn metadata_must_be_there_and_make_sense() {
    refused(
        &Draft::new().saying("wick_trace", None),
        &["not a recorded trace"],
    );
    refused(
        &Draft::new().saying("wick_trace", Some("2")),
        &["version 2", "version 1"],
    );
    for key in [
        "model_type",
        "model_hash",
        "selector",
        "is_replayed",
        "sequence_tokens",
    ] {
        refused(&Draft::new().saying(key, None), &["lacks", key]);
    }
    refused(
        &Draft::new().saying("model_type", Some("\x1b[31mred\x07")),
        &["model_type", "control characters"],
    );
    refused(
        &Draft::new().saying("is_replayed", Some("yes")),
        &["is_replayed", "yes"],
    );
    refused(
        &Draft::new().saying("sequence_tokens", Some("-1")),
        &["sequence_tokens", "-1"],
    );
}

#[test]
fn cut_or_longer_files_are_refused() {
    let bytes = Draft::new().bytes();
    for len in [0, 7, 8, 4000, bytes.len() - 1] {
        read(&bytes[..len]).unwrap_err();
    }
    read(&[&bytes[..], &[0]].concat()).unwrap_err();
    let error = RecordedTrace::open("/no/such.trace")
        .unwrap_err()
        .to_string();
    assert!(error.contains("/no/such.trace"), "{error}");
}

proptest! {
    /// Damage anywhere is an error or another sound trace, never a panic.
    #[test]
    fn damaged_bytes_do_no_harm(place in 0..5000usize, value in any::<u8>()) {
        let mut bytes = Draft::new().bytes();
        let place = place % bytes.len();
        bytes[place] = value;
        if let Ok(layers) = read(&bytes) {
            for layer in layers {
                let width = layer.intermediate_size() as u32;
                prop_assert!(layer.iter().flatten().all(|neuron| *neuron < width));
            }
        }
    }
}
