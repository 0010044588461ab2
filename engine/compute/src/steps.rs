//! Tables of ascending numbers that are kept as small as their steps: half or a third of the bytes, also of those that
//! compressors leave. The numbers are written out when they are first asked for.

use alloc::boxed::Box;
use alloc::vec::Vec;

use once_cell::race::OnceBox;

/// Ascending numbers, in so many bytes: the difference of each to the one before, 7 bits to a byte, low bits first, the
/// top bit set where more follow (LEB128).
///
/// ```
/// use starling_compute::steps::{Steps, len};
/// const NUMBERS: [u32; 3] = [7, 9, 300];
/// static TABLE: Steps<{ len(&NUMBERS) }> = Steps::new(&NUMBERS);
/// assert_eq!(TABLE.get(), NUMBERS);
/// ```
pub struct Steps<const BYTES: usize> {
    bytes: [u8; BYTES],
    numbers: OnceBox<Vec<u32>>,
}

/// Bytes that the steps of `numbers` take.
pub const fn len(numbers: &[u32]) -> usize {
    let (mut bytes, mut i, mut last) = (0, 0, 0);
    while i < numbers.len() {
        let step = numbers[i] - last;
        bytes += if step == 0 { 1 } else { (step.ilog2() / 7 + 1) as usize };
        last = numbers[i];
        i += 1;
    }
    bytes
}

impl<const BYTES: usize> Steps<BYTES> {
    /// A table of `numbers`, whose [`len`] is `BYTES`.
    pub const fn new(numbers: &[u32]) -> Self {
        let (mut bytes, mut at, mut i, mut last) = ([0; BYTES], 0, 0, 0);
        while i < numbers.len() {
            let mut step = numbers[i] - last;
            while step > 127 {
                bytes[at] = step as u8 | 128;
                step >>= 7;
                at += 1;
            }
            bytes[at] = step as u8;
            at += 1;
            last = numbers[i];
            i += 1;
        }
        assert!(at == BYTES);
        Steps { bytes, numbers: OnceBox::new() }
    }

    /// The numbers.
    pub fn get(&self) -> &[u32] {
        self.numbers.get_or_init(|| Box::new(numbers(&self.bytes)))
    }
}

fn numbers(bytes: &[u8]) -> Vec<u32> {
    let (mut all, mut last, mut step, mut shift) = (Vec::new(), 0, 0, 0);
    for &byte in bytes {
        step |= u32::from(byte & 127) << shift;
        shift += 7;
        if byte < 128 {
            last += step;
            all.push(last);
            (step, shift) = (0, 0);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: [u32; 9] = [0, 0, 1, 127, 254, 382, 70_000, 70_001, u32::MAX];

    #[test]
    fn numbers_come_back() {
        static TABLE: Steps<{ len(&NUMBERS) }> = Steps::new(&NUMBERS);
        assert_eq!(TABLE.get(), NUMBERS);
        assert!(Steps::<0>::new(&[]).get().is_empty());
    }
}
