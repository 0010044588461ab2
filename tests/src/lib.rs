//! What the tests of all targets share: the reference cases in `fixtures/reference`.

pub mod embedding;
pub mod golden;
pub mod pool;
pub mod reference;
pub mod sequences;
