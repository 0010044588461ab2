//! Lines of the system prompt that change with every request.

/// Beginnings of lines that clients put in front of the system prompt for their vendor's accounts and that differ between
/// the requests of one conversation (Claude Code).
const VOLATILE: [&str; 1] = ["x-anthropic-billing-header:"];

/// Moves volatile lines from the beginning of a system prompt to its end: in front, they would change the prefix of every
/// request, so that no cached page could be used.
pub(super) fn move_volatile_lines(system: &str) -> String {
    let mut rest = system;
    let mut moved = Vec::new();
    while let Some(line) = rest.lines().next().filter(|line| VOLATILE.iter().any(|name| line.starts_with(name))) {
        moved.push(line);
        rest = rest[line.len()..].trim_start_matches(['\r', '\n']);
    }
    if moved.is_empty() {
        return system.into();
    }
    let lines = std::iter::once(rest).filter(|rest| !rest.is_empty()).chain(moved);
    lines.collect::<Vec<&str>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volatile_lines_come_last() {
        let header = "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;";
        for (system, moved) in [
            ("Be brief.".to_string(), "Be brief.".to_string()),
            (format!("{header}\nBe brief.\nAlways."), format!("Be brief.\nAlways.\n{header}")),
            (format!("{header}\r\n{header}\n\nBe brief."), format!("Be brief.\n{header}\n{header}")),
            (header.into(), header.into()),
            // only at the beginning
            (format!("Be brief.\n{header}"), format!("Be brief.\n{header}")),
            (String::new(), String::new()),
        ] {
            assert_eq!(move_volatile_lines(&system), moved, "{system:?}");
        }
    }
}
