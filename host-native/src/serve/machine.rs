//! What this process may use of the machine.

use std::fs;
use std::path::Path;

/// Bytes of memory this process may have, and what says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// Bytes.
    pub bytes: u64,
    /// What the limit comes from.
    pub reason: String,
}

/// Where nothing says how much there is.
const UNKNOWN: u64 = 4 << 30;

/// The memory limit of the control groups this process is in, or what the machine has left, whichever is less.
pub fn memory() -> Memory {
    match (limit(), available()) {
        (Some(limit), Some(free)) if limit > free => Memory { bytes: free, reason: "available memory".into() },
        (Some(bytes), _) => Memory { bytes, reason: "the control group's limit".into() },
        (None, Some(bytes)) => Memory { bytes, reason: "available memory".into() },
        (None, None) => Memory { bytes: UNKNOWN, reason: "assumed: the system reports no memory".into() },
    }
}

/// Bytes that this process may still have when it has taken `taken`; any number where the system does not say.
pub fn left(taken: u64) -> u64 {
    let of_limit = limit().map(|limit| limit.saturating_sub(taken));
    [of_limit, available()].into_iter().flatten().min().unwrap_or(u64::MAX)
}

fn limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroup_limit(&groups, Path::new("/sys/fs/cgroup"), |path| fs::read_to_string(path).ok())
}

fn available() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")
}

/// The most bytes of memory that this process has had, if the system says. Source: proc_pid_status(5).
pub fn peak() -> Option<u64> {
    status("VmHWM")
}

/// Bytes of files that are mapped into this process and in memory: its program and libraries, which others that run them
/// share. If the system says. Source: proc_pid_status(5).
pub fn mapped_files() -> Option<u64> {
    status("RssFile")
}

fn status(key: &str) -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/self/status").ok()?, key)
}

/// The least limit from the group of this process up to the root, version 2 or 1.
fn cgroup_limit(groups: &str, root: &Path, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let number = |path: &Path| read(path)?.trim().parse::<u64>().ok();
    let mut least = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else { continue };
        let (base, file) = match controllers {
            "" => (root.to_path_buf(), "memory.max"),
            c if c.split(',').any(|name| name == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        // inside a container the path may be that of the host: the root of what is mounted holds then
        let mut at = base.join(group.trim_start_matches('/'));
        loop {
            least = [least, number(&at.join(file))].into_iter().flatten().min();
            if at == base || !at.pop() {
                break;
            }
        }
    }
    least
}

fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_least_limit_of_all_groups_counts() {
        let files = BTreeMap::from([
            ("/c/a/b/memory.max", "max\n"),
            ("/c/a/memory.max", "1000\n"),
            ("/c/memory/docker/x/memory.limit_in_bytes", "900\n"),
            ("/c/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        let read = |path: &Path| files.get(path.to_str()?).map(ToString::to_string);
        let limit = |groups: &str| cgroup_limit(groups, Path::new("/c"), read);
        assert_eq!(limit("0::/a/b\n"), Some(1000));
        assert_eq!(limit("5:memory:/docker/x\n3:cpu:/\n"), Some(900));
        assert_eq!(limit("5:memory:/elsewhere\n"), Some(9_223_372_036_854_771_712));
        assert_eq!(limit("0::/z\n"), None);
    }

    #[test]
    fn available_memory_is_read() {
        assert_eq!(meminfo("MemTotal: 5 kB\nMemAvailable:   12 kB\n", "MemAvailable"), Some(12 << 10));
    }
}
