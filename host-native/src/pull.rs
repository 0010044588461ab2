//! `starling pull`: downloads a model into the store.

use std::io::{Write, stdout};

use indicatif::HumanBytes;
use starling_host::error::Failure;
use starling_host::progress::remark;
use starling_host::registry::Registry;
use starling_host::registry::names::Sha256Hex;
use starling_host::registry::pull::PullOptions;
use starling_host::registry::source::RemoteSource;

use crate::cli::PullArgs;

/// # Errors
/// If there is no such model, or the download fails.
pub fn run(args: &PullArgs) -> Result<(), Failure> {
    let mut registry = Registry::from_env()?;
    if args.offline {
        registry.set_offline();
    }
    let expected = || Failure::Usage(format!("{:?}: expected hf:OWNER/REPO or an https URL", args.source));
    let source = RemoteSource::parse(&args.source).ok_or_else(expected)??;
    let sha256 = args.sha256.as_deref().map(Sha256Hex::parse).transpose();
    let sha256 = sha256.map_err(|_| Failure::Usage("--sha256: expected 64 hexadecimal digits".into()))?;
    let options = PullOptions {
        name: args.name.clone(),
        sha256,
        connections: args.connections.map(usize::from),
        force: args.force,
    };
    let (model, is_new) = registry.pull(&source, &options, &|_, _| {})?;
    let what = if is_new { "downloaded" } else { "up to date" };
    remark(format_args!("{}: {what}, {}", model.name, HumanBytes(model.size())));
    Ok(writeln!(stdout(), "{}", model.name)?)
}
