//! Refuses grammars with dead ends: beginnings of texts that nothing can complete. A symbol is productive if it derives
//! some text. A rule with an unproductive symbol after its first is a dead end, which an answer would meet half-way.

use alloc::vec;
use alloc::vec::Vec;

use llguidance::api::ParserLimits;
use llguidance::earley::{CGrammar, CSymIdx};

use super::{Limits, StructureError, invalid};

/// Checks that the grammar derives some text and has no dead end.
///
/// # Errors
/// [`StructureError::Invalid`].
pub(super) fn check(grammar: &CGrammar, limits: Limits) -> Result<(), StructureError> {
    let symbols = reachable(grammar);
    let is_productive = productive(grammar, &symbols, limits)?;
    let dead = |sym: &CSymIdx| !is_productive[sym.as_index()];
    if dead(&grammar.start()) {
        return Err(invalid("has no finite text: a part of it always contains itself"));
    }
    let rules = symbols.iter().flat_map(|sym| grammar.rules_of(*sym));
    if rules.map(|rule| grammar.rule_rhs(*rule).0).any(|parts| parts.iter().position(dead).is_some_and(|at| at > 0)) {
        let message = "has a dead end: texts can begin that nothing completes, for example with a key that no pattern \
                       matches, or a reference that always contains itself";
        return Err(invalid(message));
    }
    Ok(())
}

/// The symbols reachable from the start symbol.
fn reachable(grammar: &CGrammar) -> Vec<CSymIdx> {
    let mut found = vec![grammar.start()];
    let mut seen = flags(&found);
    let mut next = 0;
    while let Some(sym) = found.get(next).copied() {
        next += 1;
        for part in grammar.rules_of(sym).iter().flat_map(|rule| grammar.rule_rhs(*rule).0) {
            if !is_set(&mut seen, *part) {
                seen[part.as_index()] = true;
                found.push(*part);
            }
        }
    }
    found
}

/// For each symbol, whether it derives some text.
fn productive(grammar: &CGrammar, symbols: &[CSymIdx], limits: Limits) -> Result<Vec<bool>, StructureError> {
    let mut is_productive = flags(symbols);
    is_productive.fill(false);
    let spec = grammar.lexer_spec();
    let mut parser = ParserLimits {
        initial_lexer_fuel: super::LEXER_FUEL,
        max_lexer_states: super::MAX_LEXER_STATES,
        step_lexer_fuel: 4 * limits.items as u64,
        ..ParserLimits::default()
    };
    let mut lexer = spec.to_regex_vec(&mut parser).map_err(|e| invalid(&format_error(&e)))?;
    // of all lexemes, the lexer's initial state knows which match some text
    let state = lexer.initial_state(&spec.lexeme_set(|_| true));
    let non_empty = &lexer.state_desc(state).possible;
    // uses[s]: rules whose first symbol not yet known to be productive is s
    let mut uses: Vec<Vec<(CSymIdx, &[CSymIdx])>> = vec![Vec::new(); is_productive.len()];
    let mut ready = Vec::new();
    for sym in symbols {
        let data = grammar.sym_data(*sym);
        let has_text = data.lexeme.is_some_and(|lexeme| non_empty.contains(lexeme));
        if has_text || data.is_nullable {
            ready.push(*sym);
        }
        for rule in &data.rules {
            let parts = grammar.rule_rhs(*rule).0;
            match parts.first() {
                Some(first) => uses[first.as_index()].push((*sym, parts)),
                None => ready.push(*sym),
            }
        }
    }
    while let Some(sym) = ready.pop() {
        if core::mem::replace(&mut is_productive[sym.as_index()], true) {
            continue;
        }
        for (lhs, parts) in core::mem::take(&mut uses[sym.as_index()]) {
            match parts.iter().find(|part| !is_productive[part.as_index()]) {
                Some(part) => uses[part.as_index()].push((lhs, parts)),
                None => ready.push(lhs),
            }
        }
    }
    Ok(is_productive)
}

fn format_error(error: &dyn core::fmt::Display) -> alloc::string::String {
    alloc::format!("{error:#}")
}

/// Flags by symbol index, set for `symbols`.
fn flags(symbols: &[CSymIdx]) -> Vec<bool> {
    let mut flags = Vec::new();
    for sym in symbols {
        is_set(&mut flags, *sym);
        flags[sym.as_index()] = true;
    }
    flags
}

/// Whether the flag of a symbol is set; grows `flags` to hold it.
fn is_set(flags: &mut Vec<bool>, sym: CSymIdx) -> bool {
    if flags.len() <= sym.as_index() {
        flags.resize(sym.as_index() + 1, false);
    }
    flags[sym.as_index()]
}
