//! Tensors of other libraries as slices, for as long as a step takes.

use fusestep::launch::{
    Access, Backend, BackendError, HostList, Launch, LaunchReport, MAX_LISTS, Reduce, TensorList,
};
use fusestep::planner::Lender;
use fusestep::simd::prefetch_memory;
use fusestep::{CpuBackend, DType};

use crate::dlpack::Place;

/// How many tensors ahead memory is asked for.
const AHEAD: usize = 3;

/// The beginning of a tensor that is asked for ahead.
const SHORT_BYTES: usize = 512;

/// The tensors of one parameter, in the order of its kernel's lists; `None` without a gradient.
pub(crate) type Places = Option<[Place; MAX_LISTS]>;

/// What kernels do with a parameter's tensors, in their order.
pub(crate) type Lists = [TensorList];

/// Two parameters, by position, whose tensors overlap where one of them is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Overlap(pub(crate) usize, pub(crate) usize);

/// The tensors that were looked at last, so that those that stay are not looked at again.
#[derive(Debug, Default)]
pub(crate) struct Checked {
    borrowed: Vec<Places>,
    /// What is written, by address, and whose it is.
    written: Vec<(usize, usize, usize)>,
}

impl Checked {
    /// Checks that what is written overlaps nothing else.
    ///
    /// # Cost
    /// A comparison where nothing has moved, a search for each gradient that has, and a sort where
    /// something that is written has.
    fn check<'l>(
        &mut self,
        borrowed: &[Places],
        lists: impl Fn(usize) -> &'l Lists,
    ) -> Result<(), Overlap> {
        if self.borrowed == borrowed {
            return Ok(());
        }
        let pairs = borrowed.iter().zip(&self.borrowed);
        let same = self.borrowed.len() == borrowed.len()
            && pairs.enumerate().all(|(at, pair)| match pair {
                (Some(now), Some(before)) => {
                    written(*now, lists(at)) == written(*before, lists(at))
                }
                (now, before) => now.is_none() && before.is_none(),
            });
        let before = std::mem::take(&mut self.borrowed);
        if !same {
            self.sort(borrowed, &lists)?;
        }
        for (at, own) in borrowed.iter().enumerate() {
            let Some(places) = own else { continue };
            if same && before[at] == *own {
                continue;
            }
            for (list, place) in lists(at).iter().zip(places) {
                if list.access == Access::Read
                    && let Some(other) = self.overlapping(*place)
                {
                    self.written.clear();
                    return Err(Overlap(at, other));
                }
            }
        }
        self.borrowed = before;
        self.borrowed.clear();
        self.borrowed.extend_from_slice(borrowed);
        Ok(())
    }

    fn sort<'l>(
        &mut self,
        borrowed: &[Places],
        lists: &impl Fn(usize) -> &'l Lists,
    ) -> Result<(), Overlap> {
        self.written.clear();
        for (at, own) in borrowed.iter().enumerate() {
            for (list, place) in lists(at).iter().zip(own.iter().flatten()) {
                if list.access != Access::Read && place.len_bytes > 0 {
                    let end = place.address + place.len_bytes;
                    self.written.push((place.address, end, at));
                }
            }
        }
        self.written.sort_unstable();
        let pairs = self.written.windows(2);
        for pair in pairs {
            if pair[1].0 < pair[0].1 {
                let overlap = Overlap(pair[0].2, pair[1].2);
                self.written.clear();
                return Err(overlap);
            }
        }
        Ok(())
    }

    /// Whose tensor that is written has a byte of this place.
    fn overlapping(&self, place: Place) -> Option<usize> {
        if place.len_bytes == 0 {
            return None;
        }
        let end = place.address + place.len_bytes;
        let behind = self.written.partition_point(|&(start, ..)| start < end);
        let (_, last, whose) = self.written.get(behind.checked_sub(1)?)?;
        (*last > place.address).then_some(*whose)
    }
}

/// The places that are written; all others are left at their default.
fn written(places: [Place; MAX_LISTS], lists: &Lists) -> [Place; MAX_LISTS] {
    let mut own = [Place::default(); MAX_LISTS];
    for ((own, list), place) in own.iter_mut().zip(lists).zip(places) {
        if list.access != Access::Read {
            *own = place;
        }
    }
    own
}

/// The tensors of all parameters of a step, of which those that are written overlap no other.
pub(crate) struct Loan<'a> {
    borrowed: &'a [Places],
    backend: &'a CpuBackend,
}

impl<'a> Loan<'a> {
    /// Takes tensors over for a step.
    ///
    /// # Safety
    /// Every place is initialised host memory of a tensor that somebody keeps for `'a`, and nobody
    /// else writes to it or reads what is written. That they do not overlap is checked here.
    ///
    /// # Errors
    /// Two parameters whose tensors overlap.
    pub(crate) unsafe fn new<'l>(
        borrowed: &'a [Places],
        backend: &'a CpuBackend,
        checked: &mut Checked,
        lists: impl Fn(usize) -> &'l Lists,
    ) -> Result<Self, Overlap> {
        checked.check(borrowed, lists)?;
        Ok(Self { borrowed, backend })
    }

    /// Asks for the memory of a tensor that is updated soon, if it is too short for the processor
    /// to see what comes.
    #[inline]
    fn ask(&self, parameter: usize) {
        for place in self.borrowed[parameter].iter().flatten() {
            prefetch_memory(place.address, place.len_bytes.min(SHORT_BYTES));
        }
    }

    fn read(&self, parameter: usize, list: usize) -> &'a [u8] {
        match &self.borrowed[parameter] {
            Some(borrowed) => bytes(borrowed[list]),
            None => &[],
        }
    }
}

fn bytes<'a>(place: Place) -> &'a [u8] {
    if place.len_bytes == 0 {
        return &[];
    }
    let start = std::ptr::with_exposed_provenance(place.address);
    // SAFETY: places come from a `Loan`, whose maker promises initialised memory that is kept; it
    // is written only as a list that a kernel writes, which overlaps none that it reads.
    unsafe { std::slice::from_raw_parts(start, place.len_bytes) }
}

fn bytes_mut<'a>(place: Place) -> &'a mut [u8] {
    if place.len_bytes == 0 {
        return &mut [];
    }
    let start = std::ptr::with_exposed_provenance_mut(place.address);
    // SAFETY: as in `bytes`; the place overlaps no other of the loan, as `Checked` has found, and
    // `launch_borrowed` asks for each tensor of a launch once, from one thread.
    unsafe { std::slice::from_raw_parts_mut(start, place.len_bytes) }
}

impl Lender for Loan<'_> {
    fn backend(&self) -> &dyn Backend {
        self.backend
    }

    fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        let (members, kernel) = (launch.members, launch.kernel);
        let (borrowed, loan) = (self.borrowed, &*self);
        self.backend.launch_borrowed(launch, &|piece| {
            if let Some(&soon) = members.get(piece.tensor() + AHEAD) {
                loan.ask(soon as usize);
            }
            let Some(places) = &borrowed[members[piece.tensor()] as usize] else {
                return Ok(());
            };
            piece.update_lists(|role| {
                let mut lists = kernel.lists().iter().zip(places);
                let (list, place) = lists.find(|(list, _)| list.role == role)?;
                Some(match list.access {
                    Access::Read => HostList::Read(bytes(*place)),
                    _ => HostList::ReadWrite(bytes_mut(*place)),
                })
            })
        })
    }

    fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        let members = reduce.members;
        self.backend.reduce_borrowed(reduce, &|gradient| {
            let member = members[gradient.tensor()] as usize;
            gradient.read(self.read(member, GRADIENT))
        })
    }
}

/// Where kernels have the gradient among their lists.
pub(crate) const GRADIENT: usize = 1;

/// The steps that a tensor of one f32 or f64 counts.
///
/// # Safety
/// `place` is that of a tensor of this dtype and one element that somebody keeps and nobody writes.
pub(crate) unsafe fn read_count(place: Place, dtype: DType) -> f64 {
    // SAFETY: as the caller promises; places are aligned for their dtype.
    unsafe {
        match dtype {
            DType::F64 => *std::ptr::with_exposed_provenance::<f64>(place.address),
            _ => f64::from(*std::ptr::with_exposed_provenance::<f32>(place.address)),
        }
    }
}

/// Writes what [`read_count`] reads.
///
/// # Safety
/// As [`read_count`], and nobody reads it at the same time.
pub(crate) unsafe fn write_count(place: Place, dtype: DType, count: f64) {
    // SAFETY: as the caller promises; places are aligned for their dtype.
    unsafe {
        match dtype {
            DType::F64 => *std::ptr::with_exposed_provenance_mut(place.address) = count,
            _ => *std::ptr::with_exposed_provenance_mut(place.address) = count as f32,
        }
    }
}
