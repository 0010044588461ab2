//! Makes a component of the module: `encode MODULE COMPONENT`.

#[cfg(target_family = "wasm")]
fn main() {}

#[cfg(not(target_family = "wasm"))]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(from), Some(to)) = (arguments.next(), arguments.next()) else { return Err("two files".into()) };
    let component = wit_component::ComponentEncoder::default().module(&std::fs::read(from)?)?.validate(true).encode()?;
    Ok(std::fs::write(to, component)?)
}
