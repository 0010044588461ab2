//! Memory read bandwidth: the upper bound of decode speed, since each token reads all weights.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use starling::pool::Pool;

/// Bytes read at least: more than the last-level cache.
const LEAST: usize = 512 << 20;
/// Words of one task.
const PIECE: usize = 1 << 15;
/// Number of passes; the fastest counts.
const PASSES: usize = 5;

/// Bytes per second that all threads of the pool read together; each task reads its own range.
pub fn read(pool: &dyn Pool) -> f64 {
    let words: Vec<u64> = (0..(LEAST / 8) as u64).collect();
    let pass = |_| {
        let next = AtomicUsize::new(0);
        let start = Instant::now();
        pool.broadcast(&|| {
            while let Some(piece) = words.chunks(PIECE).nth(next.fetch_add(1, Ordering::Relaxed)) {
                black_box(sum(piece));
            }
        });
        start.elapsed().as_secs_f64()
    };
    let fastest = (0..PASSES).map(pass).fold(f64::INFINITY, f64::min);
    (words.len() * 8) as f64 / fastest
}

/// Sixteen partial sums, so that loads rather than additions are the bottleneck.
fn sum(words: &[u64]) -> u64 {
    let mut parts = [0u64; 16];
    for words in words.chunks_exact(16) {
        for (part, word) in parts.iter_mut().zip(words) {
            *part = part.wrapping_add(*word);
        }
    }
    parts.iter().fold(0, |a, b| a.wrapping_add(*b))
}
