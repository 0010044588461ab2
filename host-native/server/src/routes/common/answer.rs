//! Collects the answers of a request.

use std::time::Instant;

use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use starling_api::answer::Answer;
use starling_api::clock::Clock;
use starling_api::openai::response::ResponseHead;
use starling_api::stream::{Framing, NoEvents, StreamWriter};
use starling_host::clock::{random_id, unix_now};

use super::sse::{engine_failed, json_lines, stream_with_writes};
use super::submit::Updates;
use super::writes::Writes;
use crate::http::error::{ApiError, json};
use crate::models::instance::ModelInstance;
use crate::schedule::offload::offload;
use crate::schedule::queue::Update;

/// The head of a response with a new ID that begins with `prefix`.
pub fn response_head(instance: &ModelInstance, prefix: &str, seed: u64, session: Option<&str>) -> ResponseHead {
    ResponseHead {
        id: random_id(prefix).as_str().into(),
        created: unix_now(),
        model: (*instance.name).into(),
        system_fingerprint: instance.fingerprint.as_str().into(),
        seed,
        session_id: session.map(Into::into),
    }
}

/// Waits for all of `n` answers.
///
/// # Errors
/// The first answer that fails; the others are cancelled.
pub async fn collect(mut updates: Updates, n: usize) -> Result<Vec<Answer>, ApiError> {
    let mut answers: Vec<Answer> = (0..n).map(|_| Answer::default()).collect();
    let mut n_left = n;
    while n_left > 0 {
        let (index, update) = updates.recv().await.ok_or_else(engine_failed)?;
        if let Some(error) = update.error() {
            return Err(error);
        }
        n_left -= usize::from(matches!(update, Update::Done { .. }));
        if let Some(answer) = answers.get_mut(index) {
            answer.add(update);
        }
    }
    Ok(answers)
}

/// How a response is sent.
pub struct Delivery {
    /// Framing of a stream; `None` for a response that is sent whole.
    pub framing: Option<Framing>,
    /// A measure of the work to serialise a whole response.
    pub size: usize,
    /// Writes that must be durable before the end of the response; the writer adds them.
    pub writes: Writes,
}

/// Sends the response of `writer`: as a stream, or whole, made by `build` from the complete writer.
///
/// # Errors
/// An answer that fails, if the response is sent whole.
pub async fn respond<W, T>(
    instance: &ModelInstance,
    mut updates: Updates,
    mut writer: W,
    delivery: Delivery,
    build: impl FnOnce(W) -> T + Send + 'static,
) -> Result<Response, ApiError>
where
    W: StreamWriter + Send + Unpin + 'static,
    T: Serialize,
{
    match delivery.framing {
        Some(Framing::ServerSentEvents) => {
            return Ok(stream_with_writes(updates, writer, instance.settings().sse_keep_alive, delivery.writes));
        }
        Some(Framing::JsonLines) => return Ok(json_lines(updates, writer)),
        None => {}
    }
    loop {
        let (index, update) = updates.recv().await.ok_or_else(engine_failed)?;
        if let Some(error) = update.error() {
            return Err(error);
        }
        if writer.update(index, update, &mut NoEvents) {
            break;
        }
    }
    delivery.writes.durable().await?;
    offload(delivery.size, move || json(StatusCode::OK, &build(writer))).await
}

/// The system's clocks; monotonic time counts from `start`.
#[derive(Clone, Copy)]
pub struct SystemClock {
    pub start: Instant,
}

impl Clock for SystemClock {
    fn unix_seconds(&self) -> u64 {
        unix_now()
    }

    fn monotonic_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}
