//! Who goes when all places are taken.

use super::super::share::Common;
use super::*;

fn rooms<const N: usize>(common: usize) -> [Arc<Room>; N] {
    let places = Places::new(Common::new(common, true), REST);
    [(); N].map(|()| {
        let share = Share::new("connections", 6, 1, places.common());
        Room::new(share, &places)
    })
}

async fn place(room: &Arc<Room>) -> Result<Place, Exhausted> {
    room.place(&CancellationToken::new(), false).await
}

/// A connection that goes when it is told to.
fn connection(place: Place) -> Arc<Seat> {
    let seat = Arc::clone(place.seat());
    let end = seat.end.clone();
    tokio::spawn(async move {
        end.cancelled().await;
        drop(place);
    });
    seat
}

async fn rest() {
    tokio::time::sleep(REST).await;
}

#[tokio::test(start_paused = true)]
async fn the_connection_that_has_rested_longest_makes_room_and_a_busy_one_never_does() {
    let [room] = rooms(100);
    let mut seats = Vec::new();
    for _ in 0..6 {
        seats.push(connection(place(&room).await.unwrap()));
    }
    let busy = seats[0].works().unwrap();
    rest().await;
    drop(seats[1].works());
    rest().await;

    let seventh = connection(place(&room).await.unwrap());

    assert!(seats[2..].iter().filter(|seat| seat.end.is_cancelled()).count() == 1);
    assert!(!seats[0].end.is_cancelled() && !seats[1].end.is_cancelled());
    assert!(!seventh.end.is_cancelled());
    drop(busy);
}

#[tokio::test(start_paused = true)]
async fn nothing_begins_on_a_connection_that_was_told_to_go() {
    let [room] = rooms(100);
    let mut places = Vec::new();
    for _ in 0..6 {
        places.push(place(&room).await.unwrap());
    }
    rest().await;

    assert_eq!(room.make_room(), Making::Leaving);

    let told: Vec<_> = places.iter().filter(|place| place.seat.end.is_cancelled()).collect();
    assert_eq!(told.len(), 1);
    assert!(told[0].seat.works().is_none());
    // One at a time: whoever asks again waits for that one.
    assert_eq!(room.make_room(), Making::Leaving);
    assert_eq!(places.iter().filter(|place| place.seat.end.is_cancelled()).count(), 1);
}

#[tokio::test(start_paused = true)]
async fn where_all_are_busy_one_more_is_refused_at_once_and_a_listener_waits() {
    let [room] = rooms(100);
    let mut held = Vec::new();
    for _ in 0..6 {
        let place = place(&room).await.unwrap();
        held.push((place.seat.works(), place));
    }
    let begun = Instant::now();

    assert!(matches!(place(&room).await, Err(Exhausted::Own { max: 6, .. })));
    assert_eq!(begun.elapsed(), Duration::ZERO);
    let waiting = tokio::spawn({
        let room = Arc::clone(&room);
        async move { room.place(&CancellationToken::new(), true).await.is_ok() }
    });
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(!waiting.is_finished());
    held.pop();
    assert!(waiting.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_lease_beyond_its_fair_part_makes_room_for_one_below_it() {
    let [greedy, small, late] = rooms(4);
    let mut seats = Vec::new();
    while let Ok(place) =
        greedy.share.take(1).map(|taken| greedy.seat(taken, &CancellationToken::new()))
    {
        seats.push(connection(place));
    }
    // Its own first, and no more of what is common than is left.
    assert_eq!(seats.len(), 1 + 2);
    let kept = [connection(place(&small).await.unwrap()), connection(place(&small).await.unwrap())];
    rest().await;

    // The last common place but one is gone, and nobody may have the last two.
    let third = connection(place(&small).await.unwrap());

    assert_eq!(seats.iter().filter(|seat| seat.end.is_cancelled()).count(), 1);
    assert!(kept.iter().chain([&third]).all(|seat| !seat.end.is_cancelled()));
    // Whoever has its fair part makes room itself, and the first of a late one is always there.
    assert!(place(&late).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn the_first_connections_of_a_lease_have_a_place_whatever_others_hold() {
    let rooms: [_; 20] = rooms(8);
    let mut held = Vec::new();
    for room in &rooms[..19] {
        while let Ok(place) = place(room).await {
            held.push((place.seat.works(), place));
        }
    }

    assert!(place(&rooms[19]).await.is_ok());
}
