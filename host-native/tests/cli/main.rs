//! Tests of the `starling` command: output, messages and exit codes.

mod architectures;
mod chat;
mod embed;
mod quantize;
mod starling;
mod text;
mod transcripts;
mod wrong;
