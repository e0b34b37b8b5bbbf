//! What must hold for the tensors of any file, however it came about.
#![forbid(unsafe_code)]

use wick_checkpoint::StoredTensor;

/// Panics unless each extent lies in the file and holds what shape and strides can address.
pub fn assert_sound(tensors: &[StoredTensor], file_len: usize) {
    for tensor in tensors {
        let end = tensor.offset_bytes.checked_add(tensor.len_bytes);
        assert!(end.is_some_and(|end| end <= file_len as u64), "{tensor:?}");
        assert_eq!(tensor.shape.len(), tensor.strides.len(), "{tensor:?}");
        if tensor.shape.contains(&0) {
            continue;
        }
        let mut count = 1u64;
        let mut last = 0u64;
        for (&dim, &stride) in tensor.shape.iter().zip(&tensor.strides) {
            count = count
                .checked_mul(dim as u64)
                .expect("a sound element count");
            last += (dim as u64 - 1) * stride as u64; // panics beyond 64 bits
        }
        assert!(count <= 8 * file_len as u64, "{tensor:?}");
        if let Some(size) = size_bytes(&tensor.dtype) {
            assert_eq!((last + 1) * size, tensor.len_bytes, "{tensor:?}");
        }
    }
}

/// Bytes of an element, of the dtypes that have no blocks.
fn size_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "C128" => 16,
        "F64" | "I64" | "U64" | "C64" => 8,
        "F32" | "I32" | "U32" => 4,
        "F16" | "BF16" | "I16" | "U16" => 2,
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" => 1,
        _ => return None,
    })
}
