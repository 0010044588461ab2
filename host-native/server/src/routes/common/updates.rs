//! The updates of one HTTP request: from the engine or from an equal request, through the policy on answers.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use crate::guard::policy::AnswerFilters;
use crate::observe::usage::Usage;
use crate::schedule::queue::{EngineUpdates, Update};
use crate::state::reuse::AnswerReader;

/// Where updates come from.
enum Source {
    Engine(EngineUpdates),
    /// An equal request, in flight or before, and what its reader counts.
    Log(AnswerReader, Arc<Usage>),
}

/// Receives the updates of one HTTP request, each with the index of its answer or text.
pub struct Updates {
    source: Source,
    /// ID of the stream, if its client may resume it.
    stream_id: Option<Arc<str>>,
    /// The policy on answers, if there is one.
    filters: Option<AnswerFilters>,
}

impl Source {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Update)>> {
        match self {
            Source::Engine(updates) => updates.poll_recv(context),
            Source::Log(reader, usage) => {
                let Some(next) = ready!(reader.poll_next(context)) else { return Poll::Ready(None) };
                usage.note(&next.1);
                Poll::Ready(Some(next))
            }
        }
    }
}

impl Updates {
    fn new(source: Source) -> Updates {
        Updates { source, stream_id: None, filters: None }
    }

    /// Updates of the engine.
    pub fn of_engine(updates: EngineUpdates) -> Updates {
        Updates::new(Source::Engine(updates))
    }

    /// Updates of an equal request.
    pub fn of_log(reader: AnswerReader, usage: Arc<Usage>) -> Updates {
        Updates::new(Source::Log(reader, usage))
    }

    /// The next update; `None` if the model was unloaded by force.
    pub async fn recv(&mut self) -> Option<(usize, Update)> {
        poll_fn(|context| self.poll_recv(context)).await
    }

    /// Poll form of [`Updates::recv`].
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Update)>> {
        loop {
            if let Some(filters) = &mut self.filters {
                if let Poll::Ready(next) = filters.poll_ready(context) {
                    return Poll::Ready(Some(next));
                }
                if filters.is_asking() {
                    return Poll::Pending;
                }
            }
            let Some((index, update)) = ready!(self.source.poll_next(context)) else { return Poll::Ready(None) };
            match &mut self.filters {
                None => return Poll::Ready(Some((index, update))),
                Some(filters) => filters.push(index, update),
            }
        }
    }

    /// Gives the events of a stream IDs, so that its client may resume it.
    pub fn set_stream_id(&mut self, id: Option<Arc<str>>) {
        self.stream_id = id;
    }

    pub fn stream_id(&self) -> Option<Arc<str>> {
        self.stream_id.clone()
    }

    /// Applies a policy to the answers.
    pub fn filter(&mut self, filters: Option<AnswerFilters>) {
        self.filters = filters;
    }
}
