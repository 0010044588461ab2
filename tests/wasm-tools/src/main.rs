//! Makes a component of a module that was built with the feature `component`, typed by host-wasm/wit/starling.wit:
//!
//! ```text
//! wasm-tools component MODULE FILE
//! ```

use anyhow::{Context, Result, bail};
use wit_component::ComponentEncoder;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["component", module, file] => component(module, file),
        _ => bail!("usage: wasm-tools component MODULE FILE"),
    }
}

fn component(module: &str, file: &str) -> Result<()> {
    let module = std::fs::read(module).with_context(|| module.to_owned())?;
    let component = ComponentEncoder::default().module(&module)?.validate(true).encode()?;
    std::fs::write(file, component).with_context(|| file.to_owned())
}
