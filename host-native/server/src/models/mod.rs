//! The models of the server: which there are, which are loaded, and the workers of each.
//!
//! ```text
//! name ─► pool.rs: ModelPool ─► Entry ─► instance.rs: ModelInstance ─► queue ─► worker.rs: Worker, one or more
//!            │ budget.rs             loading.rs makes it                 dispatch.rs chooses the worker
//! ```
//!
//! A request holds its `ModelInstance` until its response is complete. Unloading and replacing a model only drop the
//! pool's reference: the last request that ends frees the weights.

pub mod actor;
mod admission;
pub mod budget;
pub mod changes;
pub mod cores;
pub mod disk_tier;
pub mod dispatch;
pub mod engines;
pub mod entry;
pub mod error;
pub mod header;
pub mod instance;
mod kv_memory;
pub mod loading;
pub mod pool;
pub mod pressure;
mod restart;
pub mod self_test;
pub mod split;
pub mod status;
mod supervision;
mod texts;
pub mod worker;
