//! The matrices on flash: which of them are loaded, being loaded, in use.
//!
//! What is read together is a unit: one matrix, the FFN of a layer in a converted folder, or one expert. A unit
//! is loaded by a background thread into buffers of its pool; when a span of one of its matrices is entered, the
//! buffer's values go into the tensor, and come out when the span is left. A dense unit gives its buffers back
//! once each of its matrices was used; an expert stays until its place is wanted.
//!
//! The order of dense units is learnt as they are used; those that always followed are read ahead, as far as the
//! pool goes. Experts are never guessed.
//!
//! Invariants:
//! - buffers of a pool never exceed its bytes;
//! - a unit in use, or about to be, keeps its buffers;
//! - a matrix that is not in use has no values, nor has one whose unit could not be read: the error is kept for
//!   [`Shared::take_error`];
//! - a span waits only for what will happen: reads that are on their way, or spans of other threads.
//!
//! Not here: what is in DRAM all the time (`plan`), spans (`layer`).

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use candle::Tensor;

use super::buffer::{put, take, Buffer};
use super::pool::Pool;
use super::source::StockSource;
use super::unit::{largest_block_bytes, StreamedMatrix, Unit};
use super::{ExpertPolicy, StockStats};
use crate::error::{Error, Result};
use crate::stored::StreamRing;

/// Threads that load units: one converts while the other one's reads are in flight.
pub(super) const LOADERS: usize = 2;

thread_local! {
    /// Spans of streamed matrices that this thread is in, of all models.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// Where the values of a unit are.
enum Place {
    Flash,
    Loading,
    Loaded(Vec<Member>),
    Failed(String),
}

/// One matrix of a loaded unit.
struct Member {
    /// Its values; `None` while they are in the tensor.
    buffer: Option<Buffer>,
    users: usize,
    was_used: bool,
}

struct UnitState {
    place: Place,
    /// Spans that wait for it: it is theirs before it is anybody's room.
    awaited: usize,
    uses: u64,
    last_use: u64,
    /// The dense unit that came next so far; `None` before it is known and once it varied.
    next: Option<usize>,
    next_varies: bool,
}

struct Inner {
    units: Vec<UnitState>,
    queue: VecDeque<(usize, Vec<Buffer>)>,
    dense: Pool,
    experts: Pool,
    last_dense: Option<usize>,
    clock: u64,
    stats: StockStats,
    error: Option<Error>,
    /// Spans that were entered without values, by matrix.
    unread: BTreeMap<usize, usize>,
    is_stopping: bool,
}

/// What loaders and spans share.
pub(super) struct Shared {
    pub(super) source: Arc<StockSource>,
    units: Vec<Unit>,
    matrices: Vec<StreamedMatrix>,
    policy: ExpertPolicy,
    inner: Mutex<Inner>,
    /// Told when a unit was loaded, failed, or gave room; and when there is something to load.
    changed: Condvar,
}

/// The store with its loader threads; gone with the last model and handle.
pub(super) struct Store {
    shared: Arc<Shared>,
    loaders: Vec<JoinHandle<()>>,
}

impl Store {
    pub(super) fn new(
        source: Arc<StockSource>,
        units: Vec<Unit>,
        matrices: Vec<StreamedMatrix>,
        dense_bytes: u64,
        expert_bytes: u64,
        policy: ExpertPolicy,
    ) -> Result<Self> {
        let state = || UnitState {
            place: Place::Flash,
            awaited: 0,
            uses: 0,
            last_use: 0,
            next: None,
            next_varies: false,
        };
        let block_bytes = largest_block_bytes(&units);
        let shared = Arc::new(Shared {
            inner: Mutex::new(Inner {
                units: units.iter().map(|_| state()).collect(),
                queue: VecDeque::new(),
                dense: Pool::new(dense_bytes),
                experts: Pool::new(expert_bytes),
                last_dense: None,
                clock: 0,
                stats: StockStats::default(),
                error: None,
                unread: BTreeMap::new(),
                is_stopping: false,
            }),
            source,
            units,
            matrices,
            policy,
            changed: Condvar::new(),
        });
        let mut store = Self {
            shared,
            loaders: Vec::new(),
        };
        for index in 0..LOADERS {
            let (shared, ring) = (store.shared.clone(), StreamRing::new(block_bytes, 0)?);
            let loader = std::thread::Builder::new()
                .name(format!("wick-stock-{index}"))
                .spawn(move || shared.load_units(ring));
            store.loaders.push(loader.map_err(|error| Error::Stock {
                reason: format!("no loader thread: {error}"),
            })?);
        }
        Ok(store)
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.lock().is_stopping = true;
        self.shared.changed.notify_all();
        for loader in self.loaders.drain(..) {
            // A loader that panicked has nothing left to tell.
            let _ = loader.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stats(&self) -> StockStats {
        let io = self.source.reader().counters();
        StockStats {
            bytes: io.bytes,
            ..self.lock().stats
        }
    }

    /// The tensor that stands for a matrix.
    pub(super) fn placeholder(&self, matrix: usize) -> Tensor {
        self.matrices[matrix].tensor.clone()
    }

    /// What went wrong since the last call.
    pub(super) fn take_error(&self) -> Option<Error> {
        self.lock().error.take()
    }

    /// Puts the values of a matrix into its tensor, waiting for them when they are on flash.
    pub(super) fn enter(&self, index: usize) {
        let matrix = &self.matrices[index];
        let mut inner = self.lock();
        inner.learn(&self.units, matrix.unit);
        inner.units[matrix.unit].awaited += 1;
        let (mut inner, outcome) = self.wait_for(inner, matrix.unit);
        inner.units[matrix.unit].awaited -= 1;
        INSIDE.set(INSIDE.get() + 1);
        let outcome = outcome.and_then(|was_missing| inner.begin_use(matrix, was_missing));
        match outcome {
            Ok(()) => inner.read_ahead(self, matrix.unit),
            Err(reason) => {
                *inner.unread.entry(index).or_insert(0) += 1;
                let reason = format!("{}: {reason}", matrix.name);
                inner.error.get_or_insert(Error::Stock { reason });
            }
        }
        drop(inner);
        self.changed.notify_all();
    }

    /// Returns when the unit is loaded, with whether it had to be asked for; or with why it cannot be.
    fn wait_for<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner>,
        unit: usize,
    ) -> (MutexGuard<'a, Inner>, std::result::Result<bool, String>) {
        let mut has_asked = false;
        loop {
            match &inner.units[unit].place {
                Place::Loaded(_) => return (inner, Ok(has_asked)),
                Place::Loading => {}
                Place::Failed(reason) => {
                    let reason = reason.clone();
                    inner.units[unit].place = Place::Flash;
                    if has_asked {
                        return (inner, Err(reason));
                    }
                    continue; // it was read ahead, and may be well by now
                }
                Place::Flash => {
                    if inner.queue_demand(self, unit) {
                        has_asked = true;
                        self.changed.notify_all();
                        continue;
                    }
                    if INSIDE.get() > 0 && !inner.is_loading(self, unit) {
                        // What this thread is in the middle of cannot end before this returns.
                        let reason = "there is no room for it beside the linear layers around it";
                        return (inner, Err(reason.to_owned()));
                    }
                }
            }
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes the values of a matrix out of its tensor again.
    pub(super) fn exit(&self, index: usize) {
        let matrix = &self.matrices[index];
        INSIDE.set(INSIDE.get().saturating_sub(1));
        let mut inner = self.lock();
        if let Some(unread) = inner.unread.get_mut(&index) {
            *unread -= 1;
            if *unread == 0 {
                inner.unread.remove(&index);
            }
            return;
        }
        if let Err(error) = inner.end_use(&self.units, matrix) {
            inner.error.get_or_insert(error.into());
        }
        inner.read_ahead(self, matrix.unit);
        drop(inner);
        self.changed.notify_all();
    }

    /// The life of a loader thread.
    fn load_units(&self, mut ring: StreamRing) {
        loop {
            let mut inner = self.lock();
            let (unit, mut buffers) = loop {
                if inner.is_stopping {
                    return;
                }
                if let Some(job) = inner.queue.pop_front() {
                    break job;
                }
                inner = self
                    .changed
                    .wait(inner)
                    .unwrap_or_else(PoisonError::into_inner);
            };
            drop(inner);
            let load = || self.load_unit(unit, &mut buffers, &mut ring);
            // Somebody waits for the outcome, whatever it is.
            let outcome = catch_unwind(AssertUnwindSafe(load)).unwrap_or_else(|_| {
                let reason = "the thread that reads weights panicked".to_owned();
                Err(Error::Stock { reason })
            });
            let mut inner = self.lock();
            inner.stats.loads += 1;
            inner.units[unit].place = match outcome {
                Ok(()) => Place::Loaded(buffers.into_iter().map(Member::fresh).collect()),
                Err(error) => {
                    inner.pool(&self.units[unit]).give_back(buffers);
                    Place::Failed(error.to_string())
                }
            };
            drop(inner);
            self.changed.notify_all();
        }
    }

    fn load_unit(&self, unit: usize, buffers: &mut [Buffer], ring: &mut StreamRing) -> Result<()> {
        let unit = &self.units[unit];
        let reader = self.source.reader();
        if let [extents] = unit.extents.as_slice() {
            return extents.load(reader, ring, buffers);
        }
        for (extents, buffer) in unit.extents.iter().zip(buffers) {
            extents.load(reader, ring, std::slice::from_mut(buffer))?;
        }
        Ok(())
    }
}

impl Member {
    fn fresh(buffer: Buffer) -> Self {
        Self {
            buffer: Some(buffer),
            users: 0,
            was_used: false,
        }
    }
}

impl Inner {
    fn pool(&mut self, unit: &Unit) -> &mut Pool {
        if unit.is_expert {
            &mut self.experts
        } else {
            &mut self.dense
        }
    }

    /// Remembers which dense unit follows which.
    fn learn(&mut self, units: &[Unit], unit: usize) {
        if units[unit].is_expert || self.last_dense == Some(unit) {
            return;
        }
        if let Some(last) = self.last_dense.replace(unit) {
            let last = &mut self.units[last];
            last.next_varies |= last.next.is_some_and(|next| next != unit);
            last.next = if last.next_varies { None } else { Some(unit) };
        }
    }

    /// Hands the values of a loaded matrix to its tensor, for one more span.
    fn begin_use(
        &mut self,
        matrix: &StreamedMatrix,
        was_missing: bool,
    ) -> std::result::Result<(), String> {
        self.clock += 1;
        let state = &mut self.units[matrix.unit];
        state.last_use = self.clock;
        let Place::Loaded(members) = &mut state.place else {
            return Err("its values went away".to_owned());
        };
        let member = &mut members[matrix.member];
        if let Some(values) = member.buffer.take() {
            put(&matrix.tensor, values).map_err(|error| error.to_string())?;
        }
        member.users += 1;
        if matrix.member == 0 && member.users == 1 {
            state.uses += 1;
            self.stats.uses += 1;
            self.stats.misses += u64::from(was_missing);
        }
        Ok(())
    }

    /// Takes them back after the last span; a dense unit whose matrices were all used makes room.
    fn end_use(&mut self, units: &[Unit], matrix: &StreamedMatrix) -> candle::Result<()> {
        let Place::Loaded(members) = &mut self.units[matrix.unit].place else {
            return Ok(());
        };
        let member = &mut members[matrix.member];
        member.users = member.users.saturating_sub(1);
        if member.users == 0 {
            member.was_used = true;
            member.buffer = take(&matrix.tensor)?;
        }
        let is_done = members.iter().all(|m| m.was_used && m.users == 0);
        if is_done && !units[matrix.unit].is_expert {
            self.give_back(units, matrix.unit);
        }
        Ok(())
    }

    /// Whether a unit of the same pool is on its way.
    fn is_loading(&self, shared: &Shared, like: usize) -> bool {
        let is_expert = shared.units[like].is_expert;
        let mut states = self.units.iter().zip(&shared.units);
        states.any(|(state, unit)| {
            unit.is_expert == is_expert && matches!(state.place, Place::Loading)
        })
    }

    /// Queues a unit that is wanted now, making room if need be; whether there was room.
    fn queue_demand(&mut self, shared: &Shared, unit: usize) -> bool {
        loop {
            let sizes = &shared.units[unit].sizes;
            match self.pool(&shared.units[unit]).take(sizes) {
                Ok(Some(buffers)) => {
                    self.units[unit].place = Place::Loading;
                    self.queue.push_front((unit, buffers));
                    return true;
                }
                Ok(None) => {}
                Err(error) => {
                    self.units[unit].place = Place::Failed(error.to_string());
                    return true;
                }
            }
            let Some(victim) = self.victim(shared, unit) else {
                return false; // somebody who uses a unit now will give it back
            };
            self.give_back(&shared.units, victim);
        }
    }

    /// The loaded unit of the same pool that is needed last, among those nobody uses.
    fn victim(&self, shared: &Shared, for_unit: usize) -> Option<usize> {
        let is_expert = shared.units[for_unit].is_expert;
        let idle = (0..self.units.len()).filter(|&unit| {
            shared.units[unit].is_expert == is_expert
                && self.units[unit].awaited == 0
                && matches!(&self.units[unit].place, Place::Loaded(members)
                    if members.iter().all(|member| member.users == 0))
        });
        idle.min_by_key(|&unit| {
            let UnitState { uses, last_use, .. } = self.units[unit];
            match shared.policy {
                // Dense units come round in turn: the one used last is needed last.
                _ if !is_expert => (0, u64::MAX - last_use),
                ExpertPolicy::Lfu => (uses, last_use),
                ExpertPolicy::Window => (0, last_use),
            }
        })
    }

    fn give_back(&mut self, units: &[Unit], unit: usize) {
        let place = std::mem::replace(&mut self.units[unit].place, Place::Flash);
        if let Place::Loaded(members) = place {
            let buffers = members.into_iter().filter_map(|member| member.buffer);
            let buffers = buffers.collect();
            self.pool(&units[unit]).give_back(buffers);
        }
    }

    /// Queues the dense units that always followed, as far as there is room.
    fn read_ahead(&mut self, shared: &Shared, from: usize) {
        let start = match shared.units[from].is_expert {
            true => self.last_dense,
            false => Some(from),
        };
        let mut at = start;
        while let Some(next) = at.and_then(|unit| self.units[unit].next) {
            // What always followed is the way that was taken since the last time here, so it ends or comes back.
            if Some(next) == start {
                return;
            }
            if matches!(self.units[next].place, Place::Flash) {
                match self.dense.take(&shared.units[next].sizes) {
                    Ok(Some(buffers)) => {
                        self.units[next].place = Place::Loading;
                        self.queue.push_back((next, buffers));
                    }
                    _ => return,
                }
            }
            at = Some(next);
        }
    }
}
