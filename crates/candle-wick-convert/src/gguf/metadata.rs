//! The metadata of one model: keys of its architecture, each error with the file and the key.

use wick_checkpoint::{CheckpointError, FromMetadata};
use wick_format::SIZE_MAX;

use super::Architecture;
use crate::source::SourceFolder;
use crate::ConvertError;

/// Keys of models that are computed otherwise. They are missing, or 0.
const UNSUPPORTED: [&str; 10] = [
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "leading_dense_block_count",
    "logit_scale",
    "residual_scale",
];

/// A GGUF file with the part of its metadata that describes the model.
pub(super) struct Described<'a> {
    pub(super) source: &'a SourceFolder,
    pub(super) architecture: Architecture,
    name: &'a str,
}

impl<'a> Described<'a> {
    pub(super) fn of(source: &'a SourceFolder) -> Result<Self, ConvertError> {
        let name = source
            .metadata
            .get("general.architecture")
            .map_err(ConvertError::weight_file(&source.path))?;
        let this = Self {
            source,
            architecture: Architecture::of(name)?,
            name,
        };
        for key in UNSUPPORTED {
            if this.number(key)?.is_some_and(|number| number != 0.0) {
                return Err(this.wrong(key, "set", "missing or 0: such models are not supported"));
            }
        }
        Ok(this)
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    /// The value of `<architecture>.<key>`, if there is one.
    pub(super) fn find<T: FromMetadata<'a>>(&self, key: &str) -> Result<Option<T>, ConvertError> {
        self.find_any(&self.key(key))
    }

    /// The value of the key `key`, if there is one.
    pub(super) fn find_any<T: FromMetadata<'a>>(
        &self,
        key: &str,
    ) -> Result<Option<T>, ConvertError> {
        let found = self.source.metadata.find(key);
        found.map_err(ConvertError::weight_file(&self.source.path))
    }

    /// A size, which must be there.
    pub(super) fn size(&self, key: &str) -> Result<usize, ConvertError> {
        let size = self.source.metadata.get(&self.key(key));
        let size = size.map_err(ConvertError::weight_file(&self.source.path))?;
        self.bounded(key, size)
    }

    /// A size that may be missing.
    pub(super) fn find_size(&self, key: &str) -> Result<Option<usize>, ConvertError> {
        let size = self.find(key)?;
        size.map(|size| self.bounded(key, size)).transpose()
    }

    fn bounded(&self, key: &str, size: usize) -> Result<usize, ConvertError> {
        if (1..=SIZE_MAX).contains(&size) {
            return Ok(size);
        }
        Err(self.wrong(key, size.to_string(), format!("1 to {SIZE_MAX}")))
    }

    /// A float that must be there.
    pub(super) fn float(&self, key: &str) -> Result<f64, ConvertError> {
        let value = self.source.metadata.get(&self.key(key));
        let value = value.map_err(ConvertError::weight_file(&self.source.path))?;
        Ok(as_written(value))
    }

    /// A number of any type that may be missing.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ConvertError> {
        match self.source.metadata.find::<f64>(&self.key(key)) {
            Ok(float) => Ok(float.map(as_written)),
            Err(_) => Ok(self.find::<i64>(key)?.map(|integer| integer as f64)),
        }
    }

    /// The error for a value of `<architecture>.<key>` that cannot be.
    pub(super) fn wrong(
        &self,
        key: &str,
        got: impl Into<String>,
        expected: impl Into<String>,
    ) -> ConvertError {
        ConvertError::weight_file(&self.source.path)(CheckpointError::Metadata {
            key: self.key(key),
            got: got.into(),
            expected: expected.into(),
        })
    }

    /// Whether the file has the tensor.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.source.get(tensor).is_some()
    }
}

/// A number that was shortened to 32 bits, as its author wrote it: 1e-5, not 9.999999747378752e-6.
fn as_written(value: f64) -> f64 {
    let short = value as f32;
    if f64::from(short) == value {
        short.to_string().parse().unwrap_or(value)
    } else {
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_get_their_decimals_back() {
        assert_eq!(as_written(f64::from(1e-5f32)), 1e-5);
        assert_eq!(as_written(1e-5), 1e-5);
        assert_eq!(as_written(500_000.0), 500_000.0);
        assert_eq!(as_written(f64::INFINITY), f64::INFINITY);
    }
}
