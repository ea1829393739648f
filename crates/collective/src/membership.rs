//! Memberships: the ranks that a split brings together, and their order.

/// The subgroup that a rank joins, and the rank's place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Ranks with the same colour come together.
    pub colour: u32,
    /// Ranks are ordered by this key, then by their rank in the group that is split.
    pub key: u32,
}

impl Membership {
    /// Colour and key in one word, for engines whose ranks are processes.
    pub fn to_word(self) -> u64 {
        u64::from(self.colour) << 32 | u64::from(self.key)
    }

    /// The membership that [`to_word`](Self::to_word) made this word of.
    pub fn from_word(word: u64) -> Self {
        Self { colour: (word >> 32) as u32, key: word as u32 }
    }

    /// The ranks of this colour in the order of the subgroup. `passed` gives the membership that
    /// each of `world_size` ranks passes.
    ///
    /// ```
    /// # use fusestep_collective::Membership;
    /// let passed = [(1, 9), (0, 5), (1, 2), (1, 9)];
    /// let passed = passed.map(|(colour, key)| Membership { colour, key });
    /// assert_eq!(passed[0].members(4, |rank| Some(passed[rank])), [2, 0, 3]);
    /// ```
    pub fn members(
        &self,
        world_size: usize,
        passed: impl Fn(usize) -> Option<Membership>,
    ) -> Vec<usize> {
        let same = |rank: &usize| passed(*rank).is_some_and(|other| other.colour == self.colour);
        let mut members: Vec<usize> = (0..world_size).filter(same).collect();
        members.sort_by_key(|&rank| (passed(rank).map(|other| other.key), rank));
        members
    }
}
