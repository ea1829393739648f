//! `Ranks`: Python's object for a rank.

mod calls;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

use fusestep::Level;
use fusestep::collective::Aborter;
use fusestep::simd::copy_bytes;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::described::Described;
use crate::device::{Device, Order};
use crate::errors::{failed, refused};
use crate::rank::{Borrowed, Kept, Resumed, Task, serve};
use crate::rules::parse;
use crate::setup::Setup;
use crate::tensor::Place;
use crate::waiting::{PAUSE, wait};

/// One of many ranks, all of which make the same calls.
#[pyclass(module = "fusestep._fusestep")]
pub(crate) struct Ranks {
    link: Mutex<Link>,
    aborter: Aborter,
    rank: usize,
    world: usize,
    plan: String,
    names: Vec<String>,
    rule_numbers: Vec<Option<usize>>,
    places: Vec<Borrowed>,
    is_in_backward: bool,
    averages: bool,
    has_lanes: bool,
    adds_in_f32: bool,
    shares_parameters: bool,
    device: Device,
    /// The library's side of the device, which knows its streams.
    library: Option<Py<PyAny>>,
    /// Memory of the views, once the thread has ended; Python's views keep this object, and so the
    /// memory.
    _kept: Mutex<Receiver<Kept>>,
}

/// Link to the rank's thread.
struct Link {
    /// Sender of tasks; `None` once the link is closed.
    tasks: Option<Sender<Task>>,
    /// Reason why the link is closed.
    closed: &'static str,
    /// Receiver that is disconnected once the thread has ended.
    ended: Option<Receiver<()>>,
}

#[pymethods]
impl Ranks {
    /// Joins the other processes with the parameters in `described`, all of which train, on the
    /// device of `library` if it has one.
    #[new]
    #[pyo3(signature = (described, rules, options, threads, library=None))]
    fn new(
        py: Python<'_>,
        described: Vec<Described>,
        rules: Vec<Bound<'_, PyDict>>,
        options: &Bound<'_, PyDict>,
        threads: usize,
        library: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let names = described.iter().map(|p| p.name.clone()).collect();
        let device = library.as_ref().map_or(Ok(Device::Host), Device::of)?;
        let (setup, rule_numbers) =
            Setup::of(&described, &rules, options, threads, device.clone())?;
        let (send_ready, ready) = channel();
        let (tasks, receive) = channel();
        let (ending, ended) = channel();
        std::thread::Builder::new()
            .name("fusestep-rank".to_owned())
            .spawn(move || serve(setup, &send_ready, &receive, ending))
            .map_err(|error| PyRuntimeError::new_err(format!("threads: {error}")))?;
        let ready = wait(py, ready, |_| {})?.map_err(failed)?;
        Ok(Self {
            link: Mutex::new(Link { tasks: Some(tasks), closed: "", ended: Some(ended) }),
            aborter: ready.aborter,
            rank: ready.rank,
            world: ready.world,
            plan: ready.plan,
            names,
            rule_numbers,
            places: ready.places,
            is_in_backward: ready.is_in_backward,
            averages: ready.averages,
            has_lanes: ready.has_lanes,
            adds_in_f32: ready.adds_in_f32,
            shares_parameters: ready.shares_parameters,
            device,
            library: library.map(Bound::unbind),
            _kept: Mutex::new(ready.kept),
        })
    }

    /// The number of this process among all.
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    /// The number of processes.
    #[getter]
    fn world_size(&self) -> usize {
        self.world
    }

    /// Whether parameters are updated while gradients come.
    #[getter]
    fn is_in_backward(&self) -> bool {
        self.is_in_backward
    }

    /// Whether ranks average parameters instead of gradients.
    #[getter]
    fn averages(&self) -> bool {
        self.averages
    }

    /// Whether gradients are added along lanes of the global batch.
    #[getter]
    fn has_lanes(&self) -> bool {
        self.has_lanes
    }

    /// Whether gradients of parameters of 16 bits are added up in float32, and taken in it.
    #[getter]
    fn adds_in_f32(&self) -> bool {
        self.adds_in_f32
    }

    /// Whether each rank has a part of the parameters alone, so that [`Self::places`] has none.
    #[getter]
    fn shares_parameters(&self) -> bool {
        self.shares_parameters
    }

    /// The plan of a step, as text.
    fn plan(&self) -> String {
        self.plan.clone()
    }

    /// The addresses of each parameter's memory, where the rank has it whole, and of its
    /// gradient's, where others may write it.
    fn places(&self) -> Vec<(Option<usize>, Option<usize>)> {
        let places = self.places.iter();
        places.map(|borrowed| (borrowed.param, borrowed.grad)).collect()
    }

    /// Takes the parameters of rank 0 and compares the settings that decide the bits.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |rank| rank.begin())
    }

    /// Takes values of a whole parameter from an address of the host, at which its tensor keeps the
    /// memory.
    fn write(&self, py: Python<'_>, index: usize, place: (usize, usize)) -> PyResult<()> {
        self.check_bytes(index, place.1)?;
        let place = Place { address: place.0, len_bytes: place.1 };
        // SAFETY: the caller's tensor has so many bytes there, and stays until this has answered:
        // the wait is not broken off.
        self.until_done(py, move |rank| rank.write(index, unsafe { bytes_at(place) }))
    }

    /// Writes whole parameters to addresses of the host, each of `len_bytes` bytes. All ranks ask
    /// for the same.
    fn gather(
        &self,
        py: Python<'_>,
        indices: Vec<usize>,
        places: Vec<(usize, usize)>,
    ) -> PyResult<()> {
        if indices.len() != places.len() {
            let (expected, found) = (indices.len(), places.len());
            return Err(PyValueError::new_err(format!(
                "places: expected one for each of {expected} parameters, found {found}"
            )));
        }
        for (&index, place) in indices.iter().zip(&places) {
            self.check_bytes(index, place.1)?;
        }
        // The thread of the rank gives them back, so that nobody writes once a wait is broken off.
        let gathered = self.call(py, move |rank| rank.gather(&indices))?;
        py.detach(|| {
            for (at, &(address, len_bytes)) in places.iter().enumerate() {
                if len_bytes > 0 {
                    let to = std::ptr::with_exposed_provenance_mut::<u8>(address);
                    // SAFETY: the caller's tensor has so many bytes there, which nobody else has.
                    let to = unsafe { std::slice::from_raw_parts_mut(to, len_bytes) };
                    to.copy_from_slice(gathered.bytes(at));
                }
            }
        });
        Ok(())
    }

    /// Copies a gradient of `len_bytes` bytes from an address into its view. The gradient's tensor
    /// keeps the memory at the address. Nothing reads the view before [`Self::given`].
    fn copy(&self, py: Python<'_>, index: usize, place: (usize, usize)) -> PyResult<()> {
        self.check(index)?;
        let (address, len_bytes) = place;
        let own = &self.places[index];
        let Some(view) = own.grad.filter(|_| own.len_bytes == len_bytes) else {
            return Err(PyValueError::new_err(format!(
                "gradient of `{}`: expected {} bytes for a view, found {len_bytes}",
                self.names[index], own.len_bytes
            )));
        };
        py.detach(|| {
            let from = std::ptr::with_exposed_provenance::<u8>(address);
            let to = std::ptr::with_exposed_provenance_mut::<u8>(view);
            // SAFETY: the caller's tensor has so many bytes there and stays; the view is of memory
            // that `_kept` keeps, apart from the tensor's own, and the rank's thread does not touch
            // it between a step and `given`.
            let (from, to) = unsafe {
                (
                    std::slice::from_raw_parts(from, len_bytes),
                    std::slice::from_raw_parts_mut(to, len_bytes),
                )
            };
            copy_bytes(Level::detect(), to, from);
        });
        Ok(())
    }

    /// Marks the gradient of a parameter as complete in its view, without waiting.
    fn given(&self, index: usize) -> PyResult<()> {
        self.check(index)?;
        self.send(Box::new(move |rank| {
            // The failure is remembered and becomes the error of the step.
            let _ = rank.attempt(|rank| rank.given(index));
        }))
    }

    /// Copies a gradient of `len_bytes` bytes from an address, at which its tensor keeps the
    /// memory: of the host, or of the ranks' device.
    fn push(&self, py: Python<'_>, index: usize, place: (usize, usize)) -> PyResult<()> {
        self.check(index)?;
        let (address, len_bytes) = place;
        let place = Place { address, len_bytes };
        match self.order(py)? {
            Order::Behind(on, stream) if len_bytes > 0 => self
                .until_done(py, move |rank| on.ordered(stream, || rank.push_on(&on, index, place))),
            _ => self.until_done(py, move |rank| {
                // SAFETY: the caller's tensor has so many bytes there, and stays until this has
                // answered: the wait is not broken off.
                rank.push(index, unsafe { bytes_at(place) })
            }),
        }
    }

    /// Copies a gradient as [`Self::push`] does, of a device without waiting: its tensor keeps
    /// memory and values until the step has ended.
    fn lend(&self, py: Python<'_>, index: usize, place: (usize, usize)) -> PyResult<()> {
        self.check(index)?;
        let (address, len_bytes) = place;
        match self.order(py)? {
            Order::Behind(on, stream) if len_bytes > 0 && stream.stays => {
                let place = Place { address, len_bytes };
                self.send(Box::new(move |rank| {
                    // The failure is remembered and becomes the error of the step.
                    let _ =
                        rank.attempt(|rank| on.ordered(stream, || rank.push_on(&on, index, place)));
                }))
            }
            _ => self.push(py, index, place),
        }
    }

    /// Ends a micro-step; if it is the last of an update, reduces and updates.
    fn step<'py>(
        &self,
        py: Python<'py>,
        rules: Vec<Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let rules = self.numbered(parse(&rules)?)?;
        let stepped = self.call(py, move |rank| rank.step(&rules))?;
        self.told(py, stepped)
    }

    /// Takes the current settings for updates that begin with the gradients to come, without
    /// waiting.
    fn take(&self, rules: Vec<Bound<'_, PyDict>>) -> PyResult<()> {
        let rules = self.numbered(parse(&rules)?)?;
        self.send(Box::new(move |rank| {
            // The failure is remembered and becomes the error of the gradient.
            let _ = rank.attempt(|rank| rank.take(&rules));
        }))
    }

    /// The number, within the update's global batch, of this rank's next micro-batch; `None`
    /// without lanes, and where the rank has none of them.
    fn micro_batch(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.call(py, |rank| Ok(rank.micro_batch()))
    }

    /// Says that the next update is of so many micro-batches only, the first ones of its global
    /// batch. A number that is refused changes nothing.
    fn set_micro_batches(&self, py: Python<'_>, count: u64) -> PyResult<()> {
        self.call(py, move |rank| Ok(rank.set_micro_batches(count)))?.map_err(refused)
    }

    /// Weighs the micro-batch under way, before its first gradient. A weight that is refused
    /// changes nothing.
    fn set_weight(&self, py: Python<'_>, weight: f64) -> PyResult<()> {
        self.call(py, move |rank| Ok(rank.set_weight(weight)))?.map_err(refused)
    }

    /// Measures the seconds of every step's parts from here on.
    fn time_steps(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |rank| {
            rank.time_steps();
            Ok(())
        })
    }

    /// Tells the loss of the step under way.
    fn set_loss(&self, py: Python<'_>, loss: f64) -> PyResult<()> {
        self.call(py, move |rank| {
            rank.set_loss(loss);
            Ok(())
        })
    }

    /// Averages parameters over all ranks.
    fn average(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |rank| rank.average())
    }

    /// Updates from fewer micro-steps than the plan accumulates, with the current settings.
    fn flush<'py>(
        &self,
        py: Python<'py>,
        rules: Vec<Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let rules = self.numbered(parse(&rules)?)?;
        let stepped = self.call(py, move |rank| rank.flush(&rules))?;
        self.told(py, stepped)
    }

    /// Prepares for writes to parameters through their views.
    fn touch(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |rank| rank.touch())
    }

    /// The factor on the next loss.
    fn loss_scale(&self, py: Python<'_>) -> PyResult<f64> {
        self.call(py, |rank| Ok(rank.loss_scale()))
    }

    /// Goes on from a folder's checkpoint and returns the number of steps that were done; `None`
    /// without a checkpoint. `any_settings` also accepts a run with other settings.
    fn resume(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        any_settings: bool,
    ) -> PyResult<Option<usize>> {
        let settings = if any_settings { Resumed::AnySettings } else { Resumed::SameSettings };
        self.call(py, move |rank| rank.resume(&folder, settings))
    }

    /// Begins a checkpoint, which is written in the background.
    fn save(&self, py: Python<'_>, folder: PathBuf, steps: usize) -> PyResult<()> {
        self.call(py, move |rank| rank.save(&folder, steps))
    }

    /// Waits for the checkpoint that is being written.
    fn finish_saves(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |rank| rank.finish_saves())
    }

    /// Ends the waits of all ranks for a reason that this one has not to come.
    fn abort(&self, reason: &str) {
        self.aborter.abort(reason);
    }

    /// Leaves the other ranks, once the checkpoint that is being written is complete.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let ended = {
            let mut link = self.link();
            if link.tasks.take().is_some() {
                link.closed = "it was closed";
            }
            link.ended.take()
        };
        let Some(mut ended) = ended else {
            return Ok(());
        };
        loop {
            let (back, came) = py.detach(move || {
                let came = ended.recv_timeout(PAUSE);
                (ended, came)
            });
            if came == Err(RecvTimeoutError::Disconnected) {
                return Ok(());
            }
            ended = back;
            py.check_signals()?;
        }
    }
}

/// Bytes of the host at a place.
///
/// # Safety
/// So many bytes are there, and nobody writes them until the result is dropped.
unsafe fn bytes_at<'a>(place: Place) -> &'a [u8] {
    if place.len_bytes == 0 {
        return &[];
    }
    let start = std::ptr::with_exposed_provenance::<u8>(place.address);
    // SAFETY: the caller's.
    unsafe { std::slice::from_raw_parts(start, place.len_bytes) }
}
