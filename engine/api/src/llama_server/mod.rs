//! llama-server's own endpoints.
//! Source: <https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md>.

pub mod completion;
pub mod props;
pub mod request;
pub mod tokenize;
