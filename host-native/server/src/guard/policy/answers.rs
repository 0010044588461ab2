//! Filters the updates of answers before they reach a writer.
//!
//! A token leaves once all of its text is decided. Tokens of a match that is replaced are dropped, since IDs and
//! log-probabilities would tell its text; the replacement goes out with the next update. A changed answer has no receipt.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use starling::engine::FinishReason;
use starling_api::update::Update;

use super::host::{Subject, TextPolicy};
use super::{Decision, Piece, Stage, StreamFilter};

/// The filters of a request's answers.
pub struct AnswerFilters {
    policy: Arc<TextPolicy>,
    subject: Arc<Subject>,
    answers: Vec<AnswerFilter>,
    /// Updates that may leave.
    ready: VecDeque<(usize, Update)>,
    /// Whether answers are held back for the hook.
    has_hook: bool,
    asking: Option<Asking>,
}

/// The hook's decision about an answer that is complete.
type Asking = Pin<Box<dyn Future<Output = (usize, Vec<Update>)> + Send>>;

impl AnswerFilters {
    /// `None` if the policy has nothing to say about answers.
    pub fn new(policy: Arc<TextPolicy>, subject: Arc<Subject>, n: usize) -> Option<AnswerFilters> {
        let (filter, has_hook) = (policy.filter(Stage::Answer), policy.has_hook(Stage::Answer));
        if filter.is_empty() && !has_hook {
            return None;
        }
        let answers = (0..n).map(|_| AnswerFilter::new(StreamFilter::new(filter.clone()))).collect();
        Some(AnswerFilters { policy, subject, answers, ready: VecDeque::new(), has_hook, asking: None })
    }

    /// The next update that may leave; pending until [`AnswerFilters::push`] has more.
    pub fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<(usize, Update)> {
        if let Some(asking) = &mut self.asking {
            let (index, updates) = ready!(asking.as_mut().poll(context));
            self.asking = None;
            self.ready.extend(updates.into_iter().map(|update| (index, update)));
        }
        self.ready.pop_front().map_or(Poll::Pending, Poll::Ready)
    }

    /// Whether the hook is asked, so that no further update may be pushed.
    pub fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// Takes an update of an answer.
    pub fn push(&mut self, index: usize, update: Update) {
        let Some(answer) = self.answers.get_mut(index) else { return };
        let was_changed = answer.is_changed;
        let mut updates = answer.push(update);
        if answer.is_changed && !was_changed {
            self.policy.count(if answer.is_over { "answer_blocked" } else { "answer_redacted" });
        }
        if !self.has_hook {
            self.ready.extend(updates.into_iter().map(|update| (index, update)));
            return;
        }
        let is_complete = updates.iter().any(|update| matches!(update, Update::Done { .. }));
        if !is_complete && !updates.iter().any(|update| matches!(update, Update::Failed(_))) {
            for update in updates {
                match update {
                    Update::Token { .. } => answer.for_hook.push(update),
                    _ => self.ready.push_back((index, update)),
                }
            }
            return;
        }
        let mut all = std::mem::take(&mut answer.for_hook);
        all.append(&mut updates);
        if is_complete {
            let (policy, subject) = (Arc::clone(&self.policy), Arc::clone(&self.subject));
            self.asking = Some(Box::pin(async move { (index, decided(&policy, &subject, all).await) }));
        } else {
            self.ready.extend(all.into_iter().map(|update| (index, update)));
        }
    }
}

/// A complete answer as the hook wants it.
async fn decided(policy: &TextPolicy, subject: &Subject, mut updates: Vec<Update>) -> Vec<Update> {
    let mut answer = String::new();
    for update in &updates {
        if let Update::Token { text, .. } | Update::Done { text, .. } = update {
            answer.push_str(text);
        }
    }
    let (new, is_blocked) = match policy.ask(Stage::Answer, subject, &answer).await {
        Decision::Allow => return updates,
        Decision::Block { .. } => (String::new(), true),
        Decision::Redact { text, .. } => (text, false),
    };
    policy.count(if is_blocked { "answer_blocked" } else { "answer_redacted" });
    updates.retain(|update| !matches!(update, Update::Token { .. }));
    for update in &mut updates {
        if let Update::Done { text, reason, receipt, .. } = update {
            *text = new.clone();
            *receipt = None;
            // the end token is dropped too, so it is not named as the reason
            *reason = match *reason {
                _ if is_blocked => FinishReason::ContentFilter,
                FinishReason::StopToken(_) => FinishReason::Complete,
                other => other,
            };
        }
    }
    updates
}

/// The filter of one answer.
struct AnswerFilter {
    stream: StreamFilter,
    /// Bytes of text so far.
    n_bytes: usize,
    /// Updates that are not decided.
    held: VecDeque<Held>,
    /// Decided text of tokens that were dropped.
    carry: String,
    n_tokens: usize,
    is_changed: bool,
    /// Whether the answer was blocked: what follows is dropped.
    is_over: bool,
    /// Tokens held back for the hook.
    for_hook: Vec<Update>,
}

/// A token, or the end of the answer.
struct Held {
    /// Its text in the answer.
    range: Range<usize>,
    update: Update,
    /// The part of its text that is decided, replacements included.
    text: String,
    is_dropped: bool,
}

impl AnswerFilter {
    fn new(stream: StreamFilter) -> AnswerFilter {
        AnswerFilter {
            stream,
            n_bytes: 0,
            held: VecDeque::new(),
            carry: String::new(),
            n_tokens: 0,
            is_changed: false,
            is_over: false,
            for_hook: Vec::new(),
        }
    }

    /// The updates that may leave after `update` has come.
    fn push(&mut self, update: Update) -> Vec<Update> {
        if self.is_over {
            return Vec::new();
        }
        let (text, is_end) = match &update {
            Update::Token { text, .. } => (text.clone(), false),
            Update::Done { text, .. } => (text.clone(), true),
            _ => return vec![update],
        };
        self.n_tokens += usize::from(!is_end);
        let range = self.n_bytes..self.n_bytes + text.len();
        self.n_bytes = range.end;
        let ends_by_token = matches!(update, Update::Done { reason: FinishReason::StopToken(_), .. });
        // the receiver removes the last token of an answer that ends by one
        let end_token = self.held.len().checked_sub(1).filter(|_| ends_by_token);
        self.held.push_back(Held { range, update, text: String::new(), is_dropped: false });
        let mut pieces = self.stream.push(&text);
        if is_end {
            pieces.extend(self.stream.finish());
        }
        for piece in pieces {
            match piece {
                Piece::Text { text, range } => {
                    for held in &mut self.held {
                        let start = held.range.start.max(range.start) - range.start;
                        let end = held.range.end.min(range.end).saturating_sub(range.start);
                        held.text.push_str(text.get(start..end).unwrap_or_default());
                    }
                }
                Piece::Redacted { replacement, range, .. } => {
                    self.is_changed = true;
                    let mut replacement = Some(replacement);
                    for (i, held) in self.held.iter_mut().enumerate() {
                        let overlaps =
                            held.range.start < range.end && range.start < held.range.end.max(held.range.start + 1);
                        if !overlaps || matches!(held.update, Update::Done { .. }) && held.range.is_empty() {
                            continue;
                        }
                        if let Some(replacement) = replacement.take() {
                            held.text.push_str(&replacement);
                        }
                        held.is_dropped = Some(i) != end_token;
                    }
                }
                Piece::Blocked { .. } => return self.block(),
            }
        }
        let decided = if is_end { self.n_bytes } else { self.n_bytes - self.stream.held().len() };
        let mut out = Vec::new();
        while self.held.front().is_some_and(|held| held.range.end <= decided) {
            let Some(held) = self.held.pop_front() else { break };
            out.extend(self.release(held));
        }
        out
    }

    /// An update that is decided.
    fn release(&mut self, held: Held) -> Option<Update> {
        self.carry.push_str(&held.text);
        match held.update {
            Update::Token { .. } if held.is_dropped => None,
            Update::Token { token, logprob, top, .. } => {
                Some(Update::Token { token, text: std::mem::take(&mut self.carry), logprob, top })
            }
            Update::Done { reason, n_tokens, receipt, .. } => {
                let receipt = receipt.filter(|_| !self.is_changed);
                Some(Update::Done { text: std::mem::take(&mut self.carry), reason, n_tokens, receipt })
            }
            other => Some(other),
        }
    }

    /// Ends the answer before a match.
    fn block(&mut self) -> Vec<Update> {
        (self.is_over, self.is_changed) = (true, true);
        let mut out = Vec::new();
        for held in std::mem::take(&mut self.held) {
            // of tokens that reach into the match, the text before it is left
            let is_whole = !held.is_dropped && !held.range.is_empty() && held.text.len() == held.range.len();
            if is_whole && matches!(held.update, Update::Token { .. }) {
                out.extend(self.release(held));
            } else {
                self.carry.push_str(&held.text);
            }
        }
        let text = std::mem::take(&mut self.carry);
        out.push(Update::Done { text, reason: FinishReason::ContentFilter, n_tokens: self.n_tokens, receipt: None });
        out
    }
}

#[cfg(test)]
mod tests;
