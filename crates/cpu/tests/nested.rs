//! Laws of launches whose tensors are borrowed: large ones one inside the other, small ones by
//! whoever has them, and the bits of a launch over tensors at hand.

#[allow(dead_code, reason = "each suite uses what it needs")]
mod common;

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Storage, backend, bytes};
use fusestep_fused_adam::Adam;
use fusestep_launch::{Backend, BackendError, ListBuffer, Precision};
use fusestep_tensor::{DType, Role};

/// Three large ones of those, the first and the last among them, at any number of threads.
const NUMELS: [u64; 8] = [150_000, 5, 1024, 400_001, 0, 70_001, 131_071, 131_072];
const LARGE: usize = 3;

thread_local! {
    /// Tensors that are lent on this thread at this moment.
    static LENT: Cell<usize> = const { Cell::new(0) };
}

/// Parameters and gradients of a storage that somebody else keeps, each behind its own lock.
struct Kept {
    params: Vec<Mutex<Vec<u8>>>,
    grads: Vec<Vec<u8>>,
    /// The most tensors that were lent on one thread at one time.
    most: AtomicUsize,
    calls: AtomicUsize,
}

/// What becomes of one tensor.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Lent,
    /// Left as it is.
    Kept(usize),
    /// Its lender fails.
    Failed(usize),
}

impl Kept {
    fn new(storage: &Storage) -> Self {
        let of = |role: Role| -> Vec<Vec<u8>> {
            let list = &storage.lists[storage.position(role)];
            let tensors = storage.offsets.iter().zip(&storage.numels);
            let of_tensor =
                tensors.map(|(&at, &numel)| list[at as usize * 4..][..numel as usize * 4].to_vec());
            of_tensor.collect()
        };
        Self {
            params: of(Role::Param).into_iter().map(Mutex::new).collect(),
            grads: of(Role::Grad),
            most: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
        }
    }

    /// One launch; the state that the plan keeps.
    fn launch(
        &self,
        storage: &Storage,
        threads: usize,
        fate: Fate,
    ) -> (Result<(), BackendError>, Vec<ListBuffer>) {
        let mut lists = storage.buffers();
        lists.retain(|list| !matches!(list.role(), Role::Param | Role::Grad));
        let batches = storage.batches(&(0..storage.elements));
        let launch = storage.launch(&batches, &mut lists, &[]);
        let done = backend(threads).launch_borrowed(launch, &|piece| {
            let tensor = piece.tensor();
            if fate == Fate::Kept(tensor) {
                return Ok(());
            }
            if fate == Fate::Failed(tensor) {
                return Err(BackendError::ForeignBuffer { backend: "lender" });
            }
            let lent = LENT.get() + 1;
            LENT.set(lent);
            self.most.fetch_max(lent, Ordering::Relaxed);
            self.calls.fetch_add(1, Ordering::Relaxed);
            let mut param = self.params[tensor].lock().unwrap();
            let updated = piece.update(&mut param, &self.grads[tensor]);
            LENT.set(lent - 1);
            updated
        });
        (done.map(drop), lists)
    }

    fn params(&self) -> Vec<Vec<u8>> {
        let params = self.params.iter();
        params.map(|param| param.lock().unwrap().clone()).collect()
    }
}

fn storage() -> Storage {
    Storage::new(
        &Adam::default(),
        (DType::F32, Precision::default()),
        &NUMELS,
    )
}

/// What a launch over tensors at hand makes of one of its lists, tensor by tensor.
fn expected(storage: &Storage, role: Role) -> Vec<Vec<u8>> {
    let mut lists = storage.buffers();
    let batches = storage.batches(&(0..storage.elements));
    let launch = storage.launch(&batches, &mut lists, &[]);
    backend(1).launch(launch).unwrap();
    cut(storage, &bytes(&lists)[storage.position(role)])
}

fn cut(storage: &Storage, list: &[u8]) -> Vec<Vec<u8>> {
    let tensors = storage.offsets.iter().zip(&storage.numels);
    let of_tensor =
        tensors.map(|(&at, &numel)| list[at as usize * 4..][..numel as usize * 4].to_vec());
    of_tensor.collect()
}

#[test]
fn large_tensors_are_held_together_and_the_bits_are_those_of_tensors_at_hand() {
    let storage = storage();
    let (params, moments) = (
        expected(&storage, Role::Param),
        expected(&storage, Role::Moment1),
    );
    for threads in [1, 2, 3, 7] {
        let kept = Kept::new(&storage);
        let (done, state) = kept.launch(&storage, threads, Fate::Lent);
        done.unwrap();
        assert!(kept.params() == params, "{threads} threads");
        let moment = state.iter().position(|list| list.role() == Role::Moment1);
        let found = cut(&storage, &bytes(&state)[moment.unwrap()]);
        assert!(found == moments, "{threads} threads");
        assert_eq!(kept.calls.into_inner(), 7);
        // The caller's thread borrows a small one while it holds them, unless others have all.
        let most = kept.most.into_inner();
        let held = if threads == 1 {
            1..=1
        } else {
            LARGE..=LARGE + 1
        };
        assert!(held.contains(&most), "{threads} threads: {most}");
    }
}

#[test]
fn a_tensor_that_is_not_lent_stays_and_the_others_do_not() {
    let storage = storage();
    let (before, after) = (Kept::new(&storage), expected(&storage, Role::Param));
    for tensor in [0, 3, 5, 7] {
        let kept = Kept::new(&storage);
        kept.launch(&storage, 2, Fate::Kept(tensor)).0.unwrap();
        for (at, found) in kept.params().iter().enumerate() {
            let own = before.params[at].lock().unwrap();
            let expected = if at == tensor { &*own } else { &after[at] };
            assert!(found == expected, "tensor {at}, without {tensor}");
        }
    }
}

#[test]
fn nothing_is_updated_if_a_large_tensor_cannot_be_had() {
    let storage = storage();
    for tensor in [0, 3, 7] {
        let kept = Kept::new(&storage);
        let error = kept
            .launch(&storage, 2, Fate::Failed(tensor))
            .0
            .unwrap_err();
        assert!(error.to_string().contains("lender"), "{error}");
        assert!(kept.params() == Kept::new(&storage).params());
    }
}
