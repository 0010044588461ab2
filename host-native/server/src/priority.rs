//! Priorities of requests.

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Priority {
    High,
    #[default]
    Normal,
    Low,
}

impl Priority {
    /// In the order of [`Priority::index`].
    pub const ALL: [Priority; 3] = [Priority::High, Priority::Normal, Priority::Low];

    pub const fn name(self) -> &'static str {
        match self {
            Priority::High => "high",
            Priority::Normal => "normal",
            Priority::Low => "low",
        }
    }

    /// Index in [`Priority::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Weight of the round robin among priorities.
    pub const fn weight(self) -> i64 {
        match self {
            Priority::High => 16,
            Priority::Normal => 4,
            Priority::Low => 1,
        }
    }
}
