//! Buffers that are used again: as many bytes as the plan allows, by dtype and length.

use candle::DType;

use super::buffer::Buffer;
use crate::error::Result;

/// Invariant: buffers handed out and kept together never exceed `limit_bytes`.
pub(super) struct Pool {
    limit_bytes: u64,
    allocated_bytes: u64,
    free: Vec<Buffer>,
}

fn bytes_of(dtype: DType, len: usize) -> u64 {
    (dtype.size_in_bytes() * len) as u64
}

impl Pool {
    pub(super) fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            allocated_bytes: 0,
            free: Vec::new(),
        }
    }

    /// A buffer of each size; `None` when they do not fit beside those handed out.
    ///
    /// # Errors
    /// The system has no memory.
    pub(super) fn take(&mut self, sizes: &[(DType, usize)]) -> Result<Option<Vec<Buffer>>> {
        let needed: u64 = sizes
            .iter()
            .map(|(dtype, len)| bytes_of(*dtype, *len))
            .sum();
        let free: u64 = self.free.iter().map(|b| bytes_of(b.dtype(), b.len())).sum();
        if self.allocated_bytes - free + needed > self.limit_bytes {
            return Ok(None);
        }
        let mut taken = Vec::with_capacity(sizes.len());
        let mut missing_bytes = 0;
        for (dtype, len) in sizes {
            let fits = |buffer: &Buffer| (buffer.dtype(), buffer.len()) == (*dtype, *len);
            let index = self.free.iter().position(fits);
            missing_bytes += index.map_or(bytes_of(*dtype, *len), |_| 0);
            taken.push(index.map(|index| self.free.swap_remove(index)));
        }
        while self.allocated_bytes + missing_bytes > self.limit_bytes {
            let Some(other) = self.free.pop() else { break };
            self.allocated_bytes -= bytes_of(other.dtype(), other.len());
            other.free();
        }
        for (slot, (dtype, len)) in taken.iter_mut().zip(sizes) {
            if slot.is_none() {
                match Buffer::zeroed(*dtype, *len) {
                    Ok(buffer) => *slot = Some(buffer),
                    Err(error) => {
                        self.free.extend(taken.into_iter().flatten());
                        return Err(error);
                    }
                }
                self.allocated_bytes += bytes_of(*dtype, *len);
            }
        }
        Ok(Some(taken.into_iter().flatten().collect()))
    }

    /// Keeps buffers for the next one who needs their sizes.
    pub(super) fn give_back(&mut self, buffers: Vec<Buffer>) {
        self.free.extend(buffers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_exceeds_its_limit_and_uses_buffers_again() {
        let mut pool = Pool::new(100);
        let sizes = [(DType::F32, 10), (DType::F16, 20)];
        let first = pool.take(&sizes).unwrap().unwrap();
        assert_eq!(pool.allocated_bytes, 80);
        assert!(pool.take(&[(DType::F32, 6)]).unwrap().is_none());
        let small = pool.take(&[(DType::F32, 5)]).unwrap().unwrap();
        assert_eq!(pool.allocated_bytes, 100);
        pool.give_back(first);
        let again = pool.take(&sizes[..1]).unwrap().unwrap();
        assert_eq!(pool.allocated_bytes, 100);
        // Another size takes the place of the one that is not in use.
        let other = pool.take(&[(DType::BF16, 19)]).unwrap().unwrap();
        assert_eq!(pool.allocated_bytes, 98);
        assert!(pool.take(&[(DType::F16, 20)]).unwrap().is_none());
        drop((small, again, other));
    }

    #[test]
    fn memory_that_the_system_does_not_have_is_not_counted() {
        let mut pool = Pool::new(u64::MAX / 2);
        let too_much = [(DType::F32, 10), (DType::F32, 1 << 59)];
        assert!(pool.take(&too_much).is_err());
        assert_eq!((pool.allocated_bytes, pool.free.len()), (40, 1));
        assert!(pool.take(&too_much[..1]).unwrap().is_some());
        assert_eq!((pool.allocated_bytes, pool.free.len()), (40, 0));
    }
}
