use super::*;

/// A core whose clock goes on by what is done with it.
struct Machine {
    start: Instant,
    passed: Cell<Duration>,
    /// How long an offer takes.
    offer: Cell<Duration>,
    offers: Cell<u32>,
    looks: Cell<u32>,
    dozes: Cell<u32>,
}

const QUICK: Duration = Duration::from_nanos(500);
const SLICE: Duration = Duration::from_millis(4);
const WAKE_UP: Duration = Duration::from_micros(30);
const LOOK: Duration = Duration::from_nanos(20);

impl Machine {
    fn new(offer: Duration) -> Self {
        Self {
            start: Instant::now(),
            passed: Cell::default(),
            offer: Cell::new(offer),
            offers: Cell::default(),
            looks: Cell::default(),
            dozes: Cell::default(),
        }
    }

    fn pass(&self, time: Duration) {
        self.passed.set(self.passed.get() + time);
    }

    /// One wait of `patience` for what never comes; the offers and looks that it took.
    fn wait(&self, patience: Patience, strangers: &mut Strangers) -> (u32, u32) {
        self.offers.set(0);
        self.looks.set(0);
        let done = || {
            self.looks.set(self.looks.get() + 1);
            false
        };
        assert!(!patience.look_on(self, strangers, done));
        self.pass(WAKE_UP);
        (self.offers.get(), self.looks.get())
    }
}

impl Core for Machine {
    fn now(&self) -> Instant {
        self.start + self.passed.get()
    }
    fn spin(&self) {
        self.pass(LOOK);
    }
    fn offer(&self) {
        self.offers.set(self.offers.get() + 1);
        self.pass(self.offer.get());
    }
    fn sleep(&self, time: Duration) {
        self.dozes.set(self.dozes.get() + 1);
        self.pass(time);
    }
}

const PATIENCES: [Patience; 2] = [Patience { has_cores: true }, Patience { has_cores: false }];

#[test]
fn what_is_done_is_seen_at_once_and_what_never_is_ends_in_sleep() {
    for waiters in [1, usize::MAX] {
        let patience = Patience::of(waiters);
        assert_eq!(patience.has_cores, waiters == 1);
        assert!(patience.look(|| true));
        assert!(!patience.look(|| false));
    }
    for (patience, offer) in PATIENCES.into_iter().zip([QUICK, SLICE]) {
        for count in [1, 2] {
            let (machine, mut strangers) = (Machine::new(offer), Strangers::default());
            let done = || {
                machine.looks.set(machine.looks.get() + 1);
                machine.looks.get() == count
            };
            // What comes in a slice that was given away is seen behind it.
            let sees = count == 1 || patience.has_cores;
            assert_eq!(patience.look_on(&machine, &mut strangers, done), sees);
        }
    }
}

#[test]
fn a_waiter_beside_a_program_that_computes_offers_its_core_a_few_times_in_ten_seconds() {
    for patience in PATIENCES {
        let (machine, mut strangers) = (Machine::new(SLICE), Strangers::default());
        let (mut offers, mut waits) = (0, 0);
        while machine.passed.get() < Duration::from_secs(10) {
            let (offered, looks) = machine.wait(patience, &mut strangers);
            offers += offered;
            waits += 1;
            assert!(looks <= 20_000 / 20 + 32, "{looks} looks take more than 20 us");
            // Who may be on the core that somebody else needs does not look at all.
            assert!(patience.has_cores || offered > 0 || looks == 0);
        }
        // 50, 100, ... 800 ms, then a second each.
        assert!((10..=16).contains(&offers), "{offers} offers, {waits} waits");
        assert!(waits > 100_000, "{waits} waits");
    }
}

#[test]
fn a_waiter_among_its_own_offers_its_core_and_ends_in_sleep() {
    for patience in PATIENCES {
        let (machine, mut strangers) = (Machine::new(QUICK), Strangers::default());
        for _ in 0..100 {
            let (offers, looks) = machine.wait(patience, &mut strangers);
            assert_eq!(offers, if patience.has_cores { OFFERS } else { FEW_OFFERS });
            assert!((offers..=OFFERS + 66).contains(&looks), "{looks}");
        }
    }
}

#[test]
fn strangers_that_are_seen_again_are_taken_to_stay_longer_until_they_have_gone() {
    let (machine, mut strangers) = (Machine::new(SLICE), Strangers::default());
    let are_about = |strangers: &Strangers| strangers.are_about(machine.now());
    assert!(!are_about(&strangers));
    strangers.offer(&machine);
    for pause in [1, 2, 4, 8, 16, 20, 20].map(|times| times * SHORTEST) {
        assert!(are_about(&strangers));
        machine.pass(pause - LOOK);
        assert!(are_about(&strangers));
        machine.pass(LOOK);
        assert!(!are_about(&strangers));
        strangers.offer(&machine);
    }
    machine.pass(2 * LONGEST);
    strangers.offer(&machine);
    machine.pass(SHORTEST);
    assert!(!are_about(&strangers), "they had gone");
    machine.offer.set(QUICK);
    strangers.offer(&machine);
    assert!(!are_about(&strangers));
}

#[test]
fn who_polls_beside_a_program_that_computes_sleeps_between_polls() {
    let polling = Polling { keep: Duration::from_micros(30), offer: Duration::from_millis(2) };
    for (offer, offers, dozes) in [(QUICK, 1_000..5_000, 100..200), (SLICE, 1..2, 100..300)] {
        let (machine, mut strangers) = (Machine::new(offer), Strangers::default());
        while machine.passed.get() < Duration::from_millis(10) {
            polling.pause_on(&machine, &mut strangers, machine.passed.get());
        }
        assert!(offers.contains(&machine.offers.get()), "{}", machine.offers.get());
        assert!(dozes.contains(&machine.dozes.get()), "{}", machine.dozes.get());
        // The next waits do not try again.
        machine.offers.set(0);
        if offer == SLICE {
            polling.pause_on(&machine, &mut strangers, Duration::from_micros(31));
            assert_eq!(machine.offers.get(), 0);
        }
    }
}
