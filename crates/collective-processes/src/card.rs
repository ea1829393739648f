//! Cards: the words that a rank shows to the others in a round.

use std::sync::atomic::{AtomicU64, Ordering};

use fusestep_collective::{CollectiveError, Fingerprint, Membership, ReduceUpdate};

use crate::layout::{CARD_WORDS, PRINT_WORDS, Participant};

const FLAGS: usize = PRINT_WORDS;
const INPUT: usize = PRINT_WORDS + 1;
const INPUT_LEN: usize = PRINT_WORDS + 2;
const OUTPUT: usize = PRINT_WORDS + 3;
const ARRIVED: usize = PRINT_WORDS + 4;
const MEMBER: usize = PRINT_WORDS + 5;
const BLOCK: usize = PRINT_WORDS + 6;
const REPLICAS: usize = PRINT_WORDS + 7;

const STAGED: u64 = 1;
const IN_PLACE: u64 = 2;
const JOINS: u64 = 4;

/// A rank's words for the others, all plain numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Card {
    pub(crate) print: Fingerprint,
    /// Whether the rank's elements lie outside of the segment and come stretch by stretch.
    pub(crate) is_staged: bool,
    /// Whether the rank's result goes where its elements are.
    pub(crate) is_in_place: bool,
    /// Offset of the rank's elements, or of the stage that stretches come through.
    pub(crate) input: u64,
    pub(crate) input_len: u64,
    /// Offset of the rank's result.
    pub(crate) output: u64,
    /// Time of the rank's arrival, by the clock that all processes have in common.
    pub(crate) arrived_ns: u64,
    /// The subgroup that the rank joins, if it splits.
    pub(crate) membership: Option<Membership>,
    /// Offset of the block of the subgroup that the rank leads.
    pub(crate) block: u64,
    /// Offsets of the rank's replicas.
    pub(crate) replicas: [u64; ReduceUpdate::MAX_REPLICAS],
}

impl Card {
    pub(crate) fn new(print: Fingerprint, arrived_ns: u64) -> Self {
        Self {
            print,
            is_staged: false,
            is_in_place: false,
            input: 0,
            input_len: 0,
            output: 0,
            arrived_ns,
            membership: None,
            block: 0,
            replicas: [0; _],
        }
    }

    /// Writes the card into the segment, where the others look for it.
    pub(crate) fn write(&self, words: &[AtomicU64; CARD_WORDS]) {
        let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
        let rest = [
            flag(self.is_staged, STAGED)
                | flag(self.is_in_place, IN_PLACE)
                | flag(self.membership.is_some(), JOINS),
            self.input,
            self.input_len,
            self.output,
            self.arrived_ns,
            self.membership.map_or(0, Membership::to_word),
            self.block,
        ];
        let print = print_words(&self.print).into_iter();
        for (word, value) in words.iter().zip(print.chain(rest).chain(self.replicas)) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

fn print_words(print: &Fingerprint) -> [u64; PRINT_WORDS] {
    let bytes = print.to_bytes();
    let words = bytes.as_chunks().0;
    std::array::from_fn(|word| u64::from_le_bytes(words[word]))
}

/// The cards of all parties of a round that is open.
#[derive(Clone, Copy)]
pub(crate) struct Cards<'a> {
    pub(crate) participants: &'a [Participant],
}

impl Cards<'_> {
    fn word(&self, party: usize, word: usize) -> u64 {
        self.participants[party].card[word].load(Ordering::Relaxed)
    }

    pub(crate) fn parties(&self) -> usize {
        self.participants.len()
    }

    pub(crate) fn is_staged(&self, party: usize) -> bool {
        self.word(party, FLAGS) & STAGED != 0
    }

    pub(crate) fn is_in_place(&self, party: usize) -> bool {
        self.word(party, FLAGS) & IN_PLACE != 0
    }

    pub(crate) fn input(&self, party: usize) -> u64 {
        self.word(party, INPUT)
    }

    pub(crate) fn input_len(&self, party: usize) -> u64 {
        self.word(party, INPUT_LEN)
    }

    pub(crate) fn output(&self, party: usize) -> u64 {
        self.word(party, OUTPUT)
    }

    pub(crate) fn arrived_ns(&self, party: usize) -> u64 {
        self.word(party, ARRIVED)
    }

    pub(crate) fn block(&self, party: usize) -> u64 {
        self.word(party, BLOCK)
    }

    pub(crate) fn replica(&self, party: usize, replica: usize) -> u64 {
        self.word(party, REPLICAS + replica)
    }

    pub(crate) fn membership(&self, party: usize) -> Option<Membership> {
        let joins = self.word(party, FLAGS) & JOINS != 0;
        joins.then(|| Membership::from_word(self.word(party, MEMBER)))
    }

    /// Requires that the fingerprints of all parties equal `own`.
    pub(crate) fn compare(&self, own: &Fingerprint) -> Result<(), CollectiveError> {
        let words = print_words(own);
        let is_same = |party: usize| (0..PRINT_WORDS).all(|at| self.word(party, at) == words[at]);
        if (0..self.parties()).all(is_same) {
            return Ok(());
        }
        let bytes_of = |party: usize| -> [[u8; 8]; PRINT_WORDS] {
            std::array::from_fn(|at| self.word(party, at).to_le_bytes())
        };
        let all: Vec<_> = (0..self.parties()).map(bytes_of).collect();
        let prints = own.read_all(0, all.iter().map(|words| words.as_flattened()))?;
        Fingerprint::compare(prints.len(), |party| &prints[party])
    }
}
