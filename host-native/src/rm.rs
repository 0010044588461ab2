//! `starling rm`: removes models from the store.

use indicatif::HumanBytes;
use starling_host::error::Failure;
use starling_host::progress::remark;
use starling_host::registry::Registry;

use crate::cli::RmArgs;
use crate::stored::find;

/// # Errors
/// If there is no such model, or a process uses it.
pub fn run(args: &RmArgs) -> Result<(), Failure> {
    let registry = Registry::from_env()?;
    let store = registry.store()?;
    for name in &args.names {
        let freed = store.remove(&find(store, name)?, args.force)?;
        remark(format_args!("{name}: removed, {} freed", HumanBytes(freed)));
    }
    Ok(())
}
