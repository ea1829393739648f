//! Loans of other libraries' tensors, as slices, for the duration of a step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fusestep::launch::{
    Access, Backend, BackendError, Buffer, HostList, Launch, LaunchReport, MAX_SUMS, Reduce,
    TensorList,
};
use fusestep::planner::{Brought, DerivedFrom, Lender, Sharing};
use fusestep::simd::prefetch_memory;
use fusestep::tensor::Role;
use fusestep::{CpuBackend, DType};

use crate::cuda::Tables;
use crate::device::StepPlace;
use crate::sharing::Shares;
use crate::stream::Asked;
use crate::tensor::Place;

/// Distance of the prefetch in tensors.
const AHEAD: usize = 3;

/// Most bytes of a tensor that are prefetched.
const SHORT_BYTES: usize = 512;

/// A parameter of the plan, as a step borrows it.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// Number of elements of each of the parameter's tensors.
    pub(crate) elements: usize,
    /// Lists of the parameter's kernel, in their order.
    pub(crate) lists: Arc<[TensorList]>,
}

impl Member {
    fn place(&self, list: usize, address: usize) -> Place {
        Place { address, len_bytes: self.lists[list].stride().len_bytes(self.elements) }
    }

    /// First address, and the one behind the last, of each tensor with elements in a list that
    /// `takes` accepts.
    fn spans<'a>(
        &'a self,
        addresses: &'a [usize],
        takes: impl Fn(Access) -> bool + 'a,
    ) -> impl Iterator<Item = (usize, usize)> + 'a {
        let lists = self.lists.iter().zip(addresses).enumerate();
        lists.filter_map(move |(list, (declared, &address))| {
            let len_bytes = self.place(list, address).len_bytes;
            (takes(declared.access) && len_bytes > 0).then_some((address, address + len_bytes))
        })
    }
}

/// Addresses of a step's tensors, in the order of its plan and of each kernel's lists.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// Number of addresses that each parameter has room for.
    most: usize,
    addresses: Vec<usize>,
    has_gradient: Vec<bool>,
}

impl Places {
    pub(crate) fn new(members: &[Member]) -> Self {
        let most = members.iter().map(|member| member.lists.len()).max();
        let most = most.unwrap_or(0);
        Self {
            most,
            addresses: vec![0; most * members.len()],
            has_gradient: vec![false; members.len()],
        }
    }

    /// The addresses of a parameter; those of state stay from step to step.
    #[inline]
    pub(crate) fn of_mut(&mut self, member: usize) -> &mut [usize] {
        &mut self.addresses[member * self.most..][..self.most]
    }

    #[inline]
    fn of(&self, member: usize) -> &[usize] {
        &self.addresses[member * self.most..][..self.most]
    }

    /// Sets whether a parameter is updated; an updated parameter needs all of its addresses.
    #[inline]
    pub(crate) fn set_has_gradient(&mut self, member: usize, has: bool) {
        self.has_gradient[member] = has;
    }

    /// Whether each parameter is updated.
    pub(crate) fn has_gradient(&self) -> &[bool] {
        &self.has_gradient
    }
}

/// Two parameters, by position, whose tensors overlap although one of the tensors is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Overlap(pub(crate) usize, pub(crate) usize);

/// Tensors of the last check, so that tensors that have not moved are not checked again.
#[derive(Debug, Default)]
pub(crate) struct Checked {
    /// Addresses at the last check; `None` until a check has succeeded.
    before: Option<Places>,
    /// First and last address of each written tensor, and its parameter.
    written: Vec<(usize, usize, usize)>,
    /// First and last address of each read tensor that has moved, and its parameter.
    read: Vec<(usize, usize, usize)>,
    /// Number of the places of the last check, of which no two have the same; 0 before the first.
    number: u64,
}

/// Numbers of places that were given.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

impl Checked {
    /// Checks that no written tensor overlaps another tensor.
    ///
    /// A comparison, if nothing has moved. Otherwise a sort of the gradients that have moved. If
    /// written tensors have moved, a sort of all written tensors, too.
    pub(crate) fn check(&mut self, now: &Places, members: &[Member]) -> Result<(), Overlap> {
        if let Some(before) = &self.before
            && before.has_gradient == now.has_gradient
            && before.addresses == now.addresses
        {
            return Ok(());
        }
        let mut before = self.before.take();
        let unmoved = before.as_ref().filter(|before| {
            before.has_gradient == now.has_gradient && are_written_alike(before, now, members)
        });
        let is_sorted = unmoved.is_some();
        if !is_sorted {
            self.sort(now, members)?;
        }
        self.read.clear();
        for (at, member) in members.iter().enumerate() {
            let is_known = unmoved.is_some_and(|before| before.of(at) == now.of(at));
            if !is_known && now.has_gradient[at] {
                let read = member.spans(now.of(at), |access| access == Access::Read);
                self.read.extend(read.map(|(start, end)| (start, end, at)));
            }
        }
        self.check_read()?;
        match &mut before {
            Some(before) => before.clone_from(now),
            None => before = Some(now.clone()),
        }
        self.before = before;
        self.number = 1 + NUMBERS.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Number of the places that were checked last: the same one as long as nothing moves.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    fn sort(&mut self, now: &Places, members: &[Member]) -> Result<(), Overlap> {
        self.written.clear();
        for (at, member) in members.iter().enumerate().filter(|(at, _)| now.has_gradient[*at]) {
            let written = member.spans(now.of(at), |access| access != Access::Read);
            self.written.extend(written.map(|(start, end)| (start, end, at)));
        }
        self.written.sort_unstable();
        let mut pairs = self.written.windows(2);
        match pairs.find(|pair| pair[1].0 < pair[0].1) {
            Some(pair) => Err(Overlap(pair[0].2, pair[1].2)),
            None => Ok(()),
        }
    }

    /// Checks that no read tensor shares a byte with a written one; sorts the read tensors.
    fn check_read(&mut self) -> Result<(), Overlap> {
        self.read.sort_unstable();
        let mut written = self.written.iter().peekable();
        for &(start, end, at) in &self.read {
            while written.next_if(|before| before.1 <= start).is_some() {}
            if let Some(&&(first, _, other)) = written.peek()
                && first < end
            {
                return Err(Overlap(at, other));
            }
        }
        Ok(())
    }
}

/// Whether all written tensors lie where they lay before.
fn are_written_alike(before: &Places, now: &Places, members: &[Member]) -> bool {
    members.iter().enumerate().all(|(at, member)| {
        let mut lists = member.lists.iter().zip(before.of(at).iter().zip(now.of(at)));
        !now.has_gradient[at]
            || lists.all(|(list, (before, now))| list.access == Access::Read || before == now)
    })
}

/// The tensors of all parameters of a step; no written tensor overlaps another one.
pub(crate) struct Loan<'a> {
    places: &'a Places,
    members: &'a [Member],
    on: &'a StepPlace<'a>,
    /// Ways to the other parts of tensors; `None` if tensors are whole.
    pub(crate) shares: Option<Shares<'a>>,
    /// Tables of a device, and wishes for the step there.
    pub(crate) tables: &'a mut Tables,
    pub(crate) asked: Asked,
}

impl<'a> Loan<'a> {
    /// Borrows tensors for a step.
    ///
    /// # Safety
    /// Every place is initialised memory, of the device of `on`, of a tensor that the caller keeps
    /// for `'a`. Nobody else writes to it, or reads memory that the step writes. This function
    /// checks that the tensors do not overlap.
    ///
    /// # Errors
    /// Two parameters with tensors that overlap.
    pub(crate) unsafe fn new(
        places: &'a Places,
        members: &'a [Member],
        on: &'a StepPlace<'a>,
        tables: &'a mut Tables,
        checked: &mut Checked,
    ) -> Result<Self, Overlap> {
        checked.check(places, members)?;
        Ok(Self { places, members, on, shares: None, tables, asked: Asked::default() })
    }

    fn tensors(&self) -> BorrowedTensors<'a> {
        BorrowedTensors { places: self.places, members: self.members }
    }
}

/// The tensors of a loan, apart from what else it has.
#[derive(Clone, Copy)]
struct BorrowedTensors<'a> {
    places: &'a Places,
    members: &'a [Member],
}

impl<'a> BorrowedTensors<'a> {
    /// Prefetches the beginning of a tensor that is updated soon; the processor foresees the rest
    /// of a long tensor itself.
    #[inline]
    fn ask(self, member: usize) {
        if self.places.has_gradient[member] {
            let bytes = self.members[member].elements * size_of::<f32>();
            for &address in self.places.of(member) {
                prefetch_memory(address, bytes.min(SHORT_BYTES));
            }
        }
    }

    /// The place of a list of a parameter that has an address for the list.
    #[inline]
    fn place(self, member: usize, (list, declared): (usize, &TensorList)) -> Place {
        Place {
            address: self.places.of(member)[list],
            len_bytes: declared.stride().len_bytes(self.members[member].elements),
        }
    }

    /// The gradient of a parameter.
    fn gradient(self, member: usize) -> &'a [u8] {
        if !self.places.has_gradient[member] {
            return &[];
        }
        let own = &self.members[member];
        bytes(own.place(GRADIENT, self.places.of(member)[GRADIENT]))
    }

    /// The place of a parameter's tensor of this role; `None` without a gradient, or where the
    /// parameter's kernel has no such list.
    fn place_of(self, member: u32, role: Role) -> Option<Place> {
        let member = member as usize;
        let own = &self.members[member];
        let list = own.lists.iter().position(|declared| declared.role == role)?;
        let address = self.places.of(member)[list];
        self.places.has_gradient[member].then(|| own.place(list, address))
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
        self.on.backend()
    }

    fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        match self.on {
            StepPlace::Host(backend) => self.tensors().launch_on(backend, launch),
            StepPlace::Cuda(on, _) => Err(BackendError::Unavailable {
                backend: on.as_backend().name(),
                reason: "expected the values that step scalars are derived from".to_owned(),
            }),
        }
    }

    fn launch_derived(
        &mut self,
        launch: Launch<'_>,
        from: DerivedFrom<'_>,
    ) -> Result<LaunchReport, BackendError> {
        match self.on {
            StepPlace::Host(backend) => self.tensors().launch_on(backend, launch),
            StepPlace::Cuda(on, _) => {
                let own = self.tensors();
                on.launch(&|member, role| own.place_of(member, role), self.tables, launch, from)
            }
        }
    }

    fn bring_control(&mut self) -> Result<Option<Box<dyn Brought>>, BackendError> {
        match (self.on, self.asked.control) {
            (StepPlace::Cuda(on, _), Some(address)) => on.bring_control(address).map(Some),
            _ => Ok(None),
        }
    }

    fn scale(&mut self, control: &mut dyn Buffer) -> Result<(), BackendError> {
        match self.on {
            StepPlace::Host(_) => Ok(()),
            StepPlace::Cuda(on, _) => on.scale(self.tables, self.asked.scale, control),
        }
    }

    fn bring(
        &mut self,
        buffer: &dyn Buffer,
        len_bytes: usize,
    ) -> Result<Box<dyn Brought>, BackendError> {
        match self.on {
            StepPlace::Host(_) => {
                let mut bytes = vec![0; len_bytes];
                self.backend().read(buffer, 0, &mut bytes)?;
                Ok(Box::new(bytes))
            }
            StepPlace::Cuda(on, _) => on.bring(buffer, len_bytes),
        }
    }

    fn sharing(&mut self) -> Option<&mut dyn Sharing> {
        self.shares.is_some().then_some(self as &mut dyn Sharing)
    }

    fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        let backend = match self.on {
            StepPlace::Host(backend) => backend,
            StepPlace::Cuda(on, _) => {
                let own = self.tensors();
                return on.reduce(&|member, role| own.place_of(member, role), self.tables, reduce);
            }
        };
        let members = reduce.members;
        let own = self.tensors();
        backend.reduce_borrowed(reduce, &|gradient| {
            let member = members[gradient.tensor()] as usize;
            gradient.read(own.gradient(member))
        })
    }
}

impl BorrowedTensors<'_> {
    /// Runs a launch in host memory.
    fn launch_on(
        self,
        backend: &CpuBackend,
        launch: Launch<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let members = launch.members;
        backend.launch_borrowed(launch, &|piece| {
            if let Some(&soon) = members.get(piece.tensor() + AHEAD) {
                self.ask(soon as usize);
            }
            let member = members[piece.tensor()] as usize;
            if !self.places.has_gradient[member] {
                return Ok(());
            }
            piece.update_lists(|list, declared| {
                let place = self.place(member, (list, declared));
                Some(match declared.access {
                    Access::Read => HostList::Read(bytes(place)),
                    _ => HostList::ReadWrite(bytes_mut(place)),
                })
            })
        })
    }
}

impl Sharing for Loan<'_> {
    fn measure(
        &mut self,
        launch: &Launch<'_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        let loan = self.tensors();
        let backend = match self.on {
            StepPlace::Host(backend) => backend,
            StepPlace::Cuda(on, _) => {
                return on.measure(&|member, role| loan.place_of(member, role), launch, sums);
            }
        };
        let lend = |tensor: usize, list: usize, declared: &TensorList| {
            let member = launch.members[tensor] as usize;
            if loan.places.has_gradient[member] {
                bytes(loan.place(member, (list, declared)))
            } else {
                &[]
            }
        };
        backend.measure_borrowed(launch, &lend, sums)
    }

    fn share(&mut self, sums: &mut [f64], width: usize) -> Result<(), BackendError> {
        self.shares.as_mut().map_or(Ok(()), |shares| shares.share(sums, width))
    }
}

/// Position of the gradient among a kernel's lists.
pub(crate) const GRADIENT: usize = 1;

/// Reads the number of steps from a tensor of one f32 or f64.
///
/// # Safety
/// `place` is that of a tensor of this dtype and one element. Someone keeps the tensor, and nobody
/// writes to it.
pub(crate) unsafe fn read_count(place: Place, dtype: DType) -> f64 {
    // SAFETY: as the caller promises; places are aligned for their dtype.
    unsafe {
        match dtype {
            DType::F64 => *std::ptr::with_exposed_provenance::<f64>(place.address),
            _ => f64::from(*std::ptr::with_exposed_provenance::<f32>(place.address)),
        }
    }
}

/// Writes the number of steps that [`read_count`] reads.
///
/// # Safety
/// As for [`read_count`]; in addition, nobody reads the number at the same time.
pub(crate) unsafe fn write_count(place: Place, dtype: DType, count: f64) {
    // SAFETY: as the caller promises; places are aligned for their dtype.
    unsafe {
        match dtype {
            DType::F64 => *std::ptr::with_exposed_provenance_mut(place.address) = count,
            _ => *std::ptr::with_exposed_provenance_mut(place.address) = count as f32,
        }
    }
}
