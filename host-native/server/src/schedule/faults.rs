//! Faults of the workers that had a request, and whether they are its own.

use std::sync::Arc;

/// Faults of a request alone, since its last token, after which it is to blame whatever they say.
const MAX_ALONE: u32 = 3;

/// The faults that ended workers of a request.
///
/// After a fault each request of the batch is a suspect and runs alone, up to its next token. A request whose worker is lost
/// while it runs alone is to blame if the fault is the same as before, or if that happens again and again.
#[derive(Debug, Default)]
pub struct Faults {
    last: Option<Arc<str>>,
    n_alone: u32,
    /// The worker that was lost last, while the request has not got past that place.
    suspect_of: Option<u32>,
}

impl Faults {
    /// Notes the loss of a worker that had this request, `alone` or with others. Returns whether the request is to blame.
    pub fn note(&mut self, fault: &Arc<str>, worker: u32, alone: bool) -> bool {
        let is_same = self.last.replace(Arc::clone(fault)).as_ref() == Some(fault);
        self.suspect_of = Some(worker);
        self.n_alone += u32::from(alone);
        alone && (is_same || self.n_alone >= MAX_ALONE)
    }

    /// Notes that the request has got past the place of the last fault. Returns whether it was a suspect.
    pub fn acquit(&mut self) -> bool {
        self.n_alone = 0;
        self.suspect_of.take().is_some()
    }

    /// The worker that was lost with this request, while it is a suspect.
    pub fn suspect_of(&self) -> Option<u32> {
        self.suspect_of
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_to_blame_for_what_happens_to_it_alone() {
        let [same, other, third] = ["same", "other", "third"].map(Arc::<str>::from);
        let mut faults = Faults::default();
        // neighbours of a poison request see its faults, and never alone
        assert!((0..9).all(|_| !faults.note(&same, 0, false)));
        assert_eq!(faults.suspect_of(), Some(0));
        assert!(faults.acquit() && !faults.acquit());
        assert_eq!(faults.suspect_of(), None);
        // the fault in a batch, and again alone
        assert!(!faults.note(&other, 1, false));
        assert!(faults.note(&other, 1, true));
        // faults that say something else each time
        let mut faults = Faults::default();
        let all = [&same, &other, &third, &same].map(|fault| faults.note(fault, 0, true));
        assert_eq!(all, [false, false, true, true]);
        // those with tokens between them are none of its own unless they are the same
        let mut faults = Faults::default();
        for fault in [&same, &other, &third, &same] {
            assert!(!faults.note(fault, 0, true));
            faults.acquit();
        }
        assert!(faults.note(&same, 0, true));
    }
}
