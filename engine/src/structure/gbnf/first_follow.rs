//! FIRST and FOLLOW sets of the lexemes and rules of a grammar (Aho, Lam, Sethi, Ullman: Compilers, section 4.4.2).

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::Work;
use super::chars::{CharSet, Unions};
use super::lexemes::Node;

/// Work of an operation on sets, in visits of expressions.
pub(super) const SET_WORK: usize = 8;

/// FOLLOW sets of the lexemes; `first` are their FIRST sets.
pub(super) fn follow_sets(
    rules: &BTreeMap<usize, Node>,
    first: &[CharSet],
    unions: &mut Unions,
    work: &mut Work,
) -> Result<Vec<CharSet>, String> {
    let mut sets = Sets { lexemes: first, first: BTreeMap::new(), follow: BTreeMap::new(), unions, work };
    loop {
        let mut changed = false;
        for (rule, node) in rules.iter().rev() {
            let now = sets.first(node)?;
            changed |= sets.first.insert(*rule, now.clone()) != Some(now);
        }
        if !changed {
            break;
        }
    }
    let mut follow = vec![CharSet::default(); first.len()];
    loop {
        let mut changed = false;
        for (rule, node) in rules {
            let after = sets.follow.get(rule).cloned().unwrap_or_default();
            changed |= sets.spread(node, after, &mut follow)?;
        }
        if !changed {
            return Ok(follow);
        }
    }
}

/// FIRST set of a node, and whether the node is nullable (matches the empty text).
type First = (CharSet, bool);

struct Sets<'a> {
    lexemes: &'a [CharSet],
    first: BTreeMap<usize, First>,
    follow: BTreeMap<usize, CharSet>,
    unions: &'a mut Unions,
    work: &'a mut Work,
}

impl Sets<'_> {
    fn first(&mut self, node: &Node) -> Result<First, String> {
        self.work.spend(SET_WORK)?;
        Ok(match node {
            Node::Empty => (CharSet::default(), true),
            Node::Lexeme(i) => (self.lexemes[*i].clone(), false),
            Node::Rule(rule) => self.first.get(rule).cloned().unwrap_or_default(),
            Node::Repeat(part, least, _) => {
                let (set, is_nullable) = self.first(part)?;
                (set, is_nullable || *least == 0)
            }
            Node::Sequence(parts) => {
                let mut sum = CharSet::default();
                for part in parts {
                    let (set, is_nullable) = self.first(part)?;
                    self.unions.add(&mut sum, &set, self.work)?;
                    if !is_nullable {
                        return Ok((sum, false));
                    }
                }
                (sum, true)
            }
            Node::Choice(parts) => {
                let (mut sum, mut is_nullable) = (CharSet::default(), false);
                for part in parts {
                    let (set, may_be_empty) = self.first(part)?;
                    self.unions.add(&mut sum, &set, self.work)?;
                    is_nullable |= may_be_empty;
                }
                (sum, is_nullable)
            }
        })
    }

    /// Adds `after`, the FOLLOW set of a node, to the FOLLOW sets of the lexemes and rules that can end it, and FIRST of each part
    /// to FOLLOW of the part before it. Returns whether the set of a rule has changed.
    fn spread(&mut self, node: &Node, mut after: CharSet, follow: &mut [CharSet]) -> Result<bool, String> {
        self.work.spend(SET_WORK)?;
        let mut changed = false;
        match node {
            Node::Empty => {}
            Node::Lexeme(i) => {
                self.unions.add(&mut follow[*i], &after, self.work)?;
            }
            Node::Rule(rule) => {
                changed = self.unions.add(self.follow.entry(*rule).or_default(), &after, self.work)?;
            }
            Node::Choice(parts) => {
                for part in parts {
                    changed |= self.spread(part, after.clone(), follow)?;
                }
            }
            Node::Sequence(parts) => {
                for part in parts.iter().rev() {
                    changed |= self.spread(part, after.clone(), follow)?;
                    let (set, is_nullable) = self.first(part)?;
                    if !is_nullable {
                        after = CharSet::default();
                    }
                    self.unions.add(&mut after, &set, self.work)?;
                }
            }
            Node::Repeat(part, _, most) => {
                if *most != Some(1) {
                    let first = self.first(part)?.0;
                    self.unions.add(&mut after, &first, self.work)?;
                }
                changed = self.spread(part, after, follow)?;
            }
        }
        Ok(changed)
    }
}

/// All characters whose UTF-8 begins with the first byte of one in the set.
pub(super) fn by_first_byte(set: &CharSet, unions: &mut Unions) -> Result<CharSet, String> {
    let size = |c: u32| match c {
        0..0x80 => 1,
        0x80..0x800 => 1 << 6,
        0x800..0x1_0000 => 1 << 12,
        _ => 1 << 18,
    };
    let whole = |(low, high): &(u32, u32)| (low & !(size(*low) - 1), high | (size(*high) - 1));
    unions.keep(CharSet::of(set.ranges().iter().map(whole).collect()))
}
