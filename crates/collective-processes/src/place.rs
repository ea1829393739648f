//! Places at the tables where ranks of a group meet.

/// A party's place at a table where rounds are held, the table of all ranks or of a pair.
#[derive(Debug)]
pub(crate) struct Place {
    /// Offset of the table in the segment.
    pub(crate) table: u64,
    /// The ranks at the table, in the order of the participants.
    pub(crate) ranks: Vec<usize>,
    /// The participant of this party.
    pub(crate) party: usize,
    /// Rounds that this party has arrived at.
    pub(crate) round: u64,
    /// Whether the table is for transfers, which go on when others leave.
    pub(crate) is_pair: bool,
}
