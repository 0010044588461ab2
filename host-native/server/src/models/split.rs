//! Split of the requests for a name between its versions, `NAME@1` and `NAME@2`.
//!
//! Weighted rendezvous hashing: the version with the highest score of a key (a session, or a user) gets all of its
//! requests. A change of weights moves only keys to versions whose weight has grown. Source: Schindelhauer and Schomaker,
//! "Weighted distributed hash tables", SPAA 2005.

use std::hash::{DefaultHasher, Hash, Hasher};

/// The version of a key, among versions with their weights; `None` if all weights are 0.
pub fn choose<'a>(versions: impl IntoIterator<Item = (&'a str, u32)>, key: &str) -> Option<&'a str> {
    let scored = versions.into_iter().filter(|(_, weight)| *weight > 0).map(|(version, weight)| {
        // uniform in (0, 1)
        let x = ((hash(version, key) >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
        (-f64::from(weight) / x.ln(), version)
    });
    scored.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, version)| version)
}

fn hash(version: &str, key: &str) -> u64 {
    let mut hash = DefaultHasher::new();
    (version, key).hash(&mut hash);
    hash.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn split_is_sticky_and_proportional(weights in prop::collection::vec(0u32..20, 1..5), seed: u64) {
            let names: Vec<String> = (0..weights.len()).map(|i| format!("m@{i}")).collect();
            let versions = || names.iter().map(String::as_str).zip(weights.iter().copied());
            let total: u32 = weights.iter().sum();
            let n = 20_000;
            let mut counts = vec![0; weights.len()];
            for i in 0..n {
                let key = format!("{seed}-{i}");
                let Some(version) = choose(versions(), &key) else { prop_assert_eq!(total, 0); continue };
                prop_assert_eq!(choose(versions(), &key), Some(version));
                counts[names.iter().position(|name| name == version).unwrap()] += 1;
            }
            for (count, weight) in counts.iter().zip(&weights) {
                let expected = f64::from(n) * f64::from(*weight) / f64::from(total.max(1));
                // five standard deviations of a binomial distribution
                prop_assert!((f64::from(*count) - expected).abs() <= 5.0 * expected.sqrt() + 1.0, "{counts:?} {weights:?}");
            }
        }

        #[test]
        fn a_growing_weight_takes_keys_and_gives_none(w in 1u32..20, more in 1u32..20, seed: u64) {
            for i in 0..500 {
                let key = format!("{seed}-{i}");
                let before = choose([("a", 10), ("b", w)], &key);
                let after = choose([("a", 10), ("b", w + more)], &key);
                prop_assert!(before == after || after == Some("b"));
            }
        }
    }
}
