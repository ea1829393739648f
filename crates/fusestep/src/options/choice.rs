//! Values that have names.

/// A value of a setting that has names for its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// The value's name.
    pub name: &'static str,
    /// One sentence on it.
    pub says: &'static str,
}

/// Values that have names.
pub(super) trait Choice: Copy + PartialEq + 'static {
    /// Every value with its name.
    const ALL: &'static [(Named, Self)];

    /// This value's name.
    fn named(self) -> Option<Named> {
        Self::ALL.iter().find(|(_, value)| *value == self).map(|(named, _)| *named)
    }
}
