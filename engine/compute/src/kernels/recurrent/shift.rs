//! Token shift of RWKV: each row gets the row of the token before it in its sequence.

use super::{StateMemory, StateSpan};

/// Copies to each row of `out` the row of `x` before it in its sequence, both (rows, width). The row before the first one
/// is at `state_at` of the sequence's slot, which gets the last row.
///
/// # Panics
/// If a row or a state is outside its memory.
pub fn token_shift(
    x: &[f32],
    width: usize,
    out: &mut [f32],
    spans: &[StateSpan],
    (states, state_at): (&mut StateMemory, usize),
) {
    for span in spans.iter().filter(|span| span.n > 0) {
        let state = &mut states.slot_mut(span.slot)[state_at..state_at + width];
        let (rows, end) = (span.row * width, (span.row + span.n) * width);
        out[rows..rows + width].copy_from_slice(state);
        out[rows + width..end].copy_from_slice(&x[rows..end - width]);
        state.copy_from_slice(&x[end - width..end]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_move_by_one_within_their_sequence() {
        let mut states = StateMemory::zeroed(3, 2).expect("memory");
        states.slot_mut(1).copy_from_slice(&[0.0, 8.0, 9.0]);
        let (x, mut out) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0; 6]);
        let spans = [StateSpan { row: 0, n: 1, slot: 0 }, StateSpan { row: 1, n: 2, slot: 1 }];
        token_shift(&x, 2, &mut out, &spans, (&mut states, 1));
        assert_eq!(out, [0.0, 0.0, 8.0, 9.0, 3.0, 4.0]);
        assert_eq!((states.slot(0), states.slot(1)), (&[0.0, 1.0, 2.0][..], &[0.0, 5.0, 6.0][..]));
    }
}
