//! Who may do what: keys, signatures, rights, the policy on texts, the audit log.

pub mod administrator;
pub mod audit;
pub mod auth;
pub mod connection_memory;
pub mod key_file;
pub mod peer;
pub mod policy;
pub mod rights;
pub mod signature;
