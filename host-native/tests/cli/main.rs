//! Tests of the `starling` command: output, messages and exit codes.

mod chat;
mod embed;
mod quantize;
mod starling;
mod text;
mod transcripts;
mod wrong;
