//! Helpers shared by the tests of all targets: reference cases, goldens, thread pools, batches.

pub mod architecture;
pub mod embedding;
pub mod golden;
pub mod numpy;
pub mod pool;
pub mod reference;
pub mod sequences;
