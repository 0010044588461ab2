//! Who may do what: keys, signatures, rights, the policy on texts, the audit log.

pub mod audit;
pub mod auth;
pub mod key_file;
pub mod policy;
pub mod rights;
pub mod signature;
