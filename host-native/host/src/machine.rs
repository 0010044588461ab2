//! Memory limits of this process: control groups and the machine.

use std::fs;
use std::path::Path;

/// Memory that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    pub bytes: u64,
    /// Origin of the limit, for the log.
    pub reason: String,
}

/// Memory use at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Reading {
    /// Share of the limit in use, without pages of files that can be dropped.
    pub usage: Option<f64>,
    /// Percentage of the last 10 s in which some task waited for memory (PSI).
    pub stalled: Option<f64>,
}

/// Assumed memory where the system reports none.
const UNKNOWN: u64 = 4 << 30;

/// The lower of the control groups' limit and the machine's available memory.
pub fn memory() -> Memory {
    match (limit(), available()) {
        (Some(limit), Some(free)) if limit > free => Memory { bytes: free, reason: "available memory".into() },
        (Some(bytes), _) => Memory { bytes, reason: "the control group's limit".into() },
        (None, Some(bytes)) => Memory { bytes, reason: "available memory".into() },
        (None, None) => Memory { bytes: UNKNOWN, reason: "assumed: the system reports no memory".into() },
    }
}

/// Bytes that this process may still allocate after `taken`; `u64::MAX` if the system reports no limit.
pub fn left(taken: u64) -> u64 {
    let of_limit = limit().map(|limit| limit.saturating_sub(taken));
    [of_limit, available()].into_iter().flatten().min().unwrap_or(u64::MAX)
}

/// Memory use of the control group with the lowest limit, or of the machine, and the time that tasks wait for memory.
/// Sources: <https://docs.kernel.org/admin-guide/cgroup-v2.html>, <https://docs.kernel.org/accounting/psi.html>.
pub fn memory_reading() -> Reading {
    let read = |path: &Path| fs::read_to_string(path).ok();
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"));
    let root = Path::new("/sys/fs/cgroup");
    let directory = group.map(|group| root.join(group.trim_start_matches('/'))).filter(|path| path.is_dir());
    let directory = directory.unwrap_or_else(|| root.into());
    let of_group = group_usage(&directory, read);
    let machine = read(Path::new("/proc/meminfo")).and_then(|text| {
        let (total, available) = (meminfo(&text, "MemTotal")?, meminfo(&text, "MemAvailable")?);
        Some(1.0 - available as f64 / total.max(1) as f64)
    });
    let usage = [of_group, machine].into_iter().flatten().reduce(f64::max);
    let stalled = read(&directory.join("memory.pressure")).or_else(|| read(Path::new("/proc/pressure/memory")));
    Reading { usage, stalled: stalled.and_then(|text| stalled_percent(&text)) }
}

/// Share of a control group's limit in use, without file pages that the kernel would drop first.
fn group_usage(directory: &Path, read: impl Fn(&Path) -> Option<String>) -> Option<f64> {
    let number = |file: &str| read(&directory.join(file))?.trim().parse::<u64>().ok();
    let limit = [number("memory.high"), number("memory.max")].into_iter().flatten().min()?;
    let stat = read(&directory.join("memory.stat")).unwrap_or_default();
    let inactive = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse::<u64>().ok());
    let used = number("memory.current")?.saturating_sub(inactive.unwrap_or(0));
    Some(used as f64 / limit.max(1) as f64)
}

/// `avg10` of the line `some`.
fn stalled_percent(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_whitespace().find_map(|field| field.strip_prefix("avg10=")?.parse().ok())
}

fn limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroup_limit(&groups, Path::new("/sys/fs/cgroup"), |path| fs::read_to_string(path).ok())
}

fn available() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")
}

/// Peak resident memory of this process in bytes, if the system reports it. Source: proc_pid_status(5).
pub fn peak() -> Option<u64> {
    status("VmHWM")
}

/// Resident bytes of mapped files (program and libraries, which processes share), if the system reports them. Source:
/// proc_pid_status(5).
pub fn mapped_files() -> Option<u64> {
    status("RssFile")
}

fn status(key: &str) -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/self/status").ok()?, key)
}

/// The lowest limit from the group of this process up to the root, cgroup v2 or v1.
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
        // inside a container the path may be the host's; then the mounted root has the limit
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
    fn the_lowest_limit_of_all_groups_applies() {
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
    fn usage_of_a_group_does_not_count_pages_that_can_be_dropped() {
        let files = BTreeMap::from([
            ("/g/memory.current", "900\n"),
            ("/g/memory.high", "1000\n"),
            ("/g/memory.max", "max\n"),
            ("/g/memory.stat", "anon 300\ninactive_file 400\nactive_file 200\n"),
        ]);
        let read = |path: &Path| files.get(path.to_str()?).map(ToString::to_string);
        assert_eq!(group_usage(Path::new("/g"), read), Some(0.5));
        assert_eq!(group_usage(Path::new("/none"), read), None);
        let psi = "some avg10=12.50 avg60=1.00 avg300=0.10 total=5\nfull avg10=2.00 avg60=0.00 avg300=0.00 total=1\n";
        assert_eq!(stalled_percent(psi), Some(12.5));
    }

    #[test]
    fn available_memory_is_read() {
        assert_eq!(meminfo("MemTotal: 5 kB\nMemAvailable:   12 kB\n", "MemAvailable"), Some(12 << 10));
    }
}
