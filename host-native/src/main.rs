//! The `starling` command.
fn main() {}
