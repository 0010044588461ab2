//! Makes what ships of a module that the compiler made:
//!
//! ```text
//! wasm-tools bindgen MODULE NAME FOLDER [restarts]   the face for JavaScript, as `wasm-bindgen --target web` writes it;
//!                                                    for a module that starts again after a crash
//! wasm-tools component MODULE FILE                   a component, typed by the WIT that the module was built with
//! ```

use anyhow::{Context, Result, bail, ensure};
use wasm_bindgen_cli_support::Bindgen;
use wit_component::ComponentEncoder;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["bindgen", module, name, folder] => bindgen(module, name, folder, false),
        ["bindgen", module, name, folder, "restarts"] => bindgen(module, name, folder, true),
        ["component", module, file] => component(module, file),
        _ => bail!("usage: wasm-tools bindgen MODULE NAME FOLDER [restarts], or wasm-tools component MODULE FILE"),
    }
}

/// Without the names of functions; the face finds its module by what the page gives it.
fn bindgen(module: &str, name: &str, folder: &str, restarts: bool) -> Result<()> {
    let of_crate = version(include_str!("../../../Cargo.lock"), "wasm-bindgen")?;
    let of_tool = version(include_str!("../Cargo.lock"), "wasm-bindgen-cli-support")?;
    ensure!(
        of_crate == of_tool,
        "wasm-bindgen is {of_crate} in Cargo.lock, {of_tool} in tests/wasm-tools/Cargo.lock: cargo update \
         --manifest-path tests/wasm-tools/Cargo.toml -p wasm-bindgen-cli-support --precise {of_crate}"
    );
    Bindgen::new()
        .input_path(module)
        .web(true)?
        .out_name(name)
        .typescript(true)
        .reset_state_function(restarts)
        .omit_default_module_path(true)
        .remove_name_section(true)
        .remove_producers_section(true)
        .generate(folder)
}

fn component(module: &str, file: &str) -> Result<()> {
    let module = std::fs::read(module).with_context(|| module.to_owned())?;
    let component = ComponentEncoder::default().module(&module)?.validate(true).encode()?;
    std::fs::write(file, component).with_context(|| file.to_owned())
}

/// The version of a package in a lock file.
fn version<'a>(lock: &'a str, package: &str) -> Result<&'a str> {
    let at = format!("name = \"{package}\"\nversion = \"");
    let rest = lock.split_once(&at).with_context(|| format!("no {package} in a lock file"))?.1;
    Ok(rest.split('"').next().unwrap_or(rest))
}
