//! The command as its users see it: output, messages and exit codes.

mod chat;
mod embed;
mod quantize;
mod starling;
mod text;
mod wrong;
