//! A program with the server inside of it: it serves the bundled model until Ctrl-C.
//!
//!     cargo run --release -p starling-server --example embedded

use starling_server::RunningServer;
use starling_server::config::ServeOptions;

/// A server on a free port. The other settings are those of the environment (`STARLING_QUEUE_HIGH`), or defaults.
pub(crate) async fn start() -> Result<RunningServer, Box<dyn std::error::Error>> {
    let flags = vec![("port", "0".into()), ("ctx-size", "512".into())];
    Ok(RunningServer::start(ServeOptions { flags, ..ServeOptions::default() }).await?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = start().await?;
    println!("{}/v1/chat/completions", server.url());
    tokio::signal::ctrl_c().await?;
    // running requests are completed
    server.stop().await?;
    Ok(())
}
