//! Tests of the index table: it behaves as a map, whatever happens to it.

use super::*;
use std::collections::BTreeMap;

const TTL_S: [u64; 3] = [0, 259_200, 604_800];

fn key(n: u64) -> Key16 {
    let mut state = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state >> 29;
        state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state ^= state >> 32;
        state
    };
    let mut key = [0; 16];
    key[..8].copy_from_slice(&next().to_le_bytes());
    key[8..].copy_from_slice(&next().to_le_bytes());
    key
}

fn record(index: u32, epoch: u32) -> Record {
    Record::new(7, index, 0, epoch, 0xfff, STATE_COMMITTED, 1, 0)
}

#[test]
fn the_table_behaves_as_a_map_under_random_edits() {
    let (mut table, mut model) = (Table::new(), BTreeMap::new());
    let mut state = 1u64;
    for step in 0..60_000u32 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let key = key(state >> 33 & 0xfff);
        if state >> 20 & 3 == 0 {
            assert_eq!(table.remove(&key), model.remove(&key));
        } else {
            table.set(&key, record(step, 0));
            model.insert(key, record(step, 0));
        }
        assert_eq!(table.len(), model.len());
    }
    for n in 0..0x1000 {
        assert_eq!(table.get(&key(n)), model.get(&key(n)).copied());
    }
}

#[test]
fn a_prefix_ends_where_a_map_says_that_a_key_is_not_there() {
    let mut table = Table::new();
    // Equal hashes, and keys of zero bytes, which look like free entries.
    let mut keys: Vec<Key16> = (0..3_000).map(key).collect();
    keys.extend((0..9u8).map(|n| [n, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
    keys.extend((1..10u8).map(|n| [n; 16]));
    for (number, key) in keys.iter().enumerate() {
        let flat = keys[..=number].concat();
        assert_eq!(table.match_prefix(&flat, 16, 0, &TTL_S), (number, Stop::Absent));
        table.set(key, record(number as u32, 0));
        assert_eq!(table.match_prefix(&flat, 16, 0, &TTL_S), (number + 1, Stop::All));
    }
    for gone in [0, 1_500, 3_000, 3_008, 3_017] {
        let kept = table.remove(&keys[gone]).unwrap();
        let found = table.match_prefix(&keys.concat(), 16, 0, &TTL_S);
        assert_eq!(found, (gone, Stop::Absent));
        table.set(&keys[gone], kept);
    }
}

#[test]
fn a_block_costs_at_most_64_bytes_at_any_size_past_the_first_thousands() {
    let mut table = Table::new();
    for n in 0..300_000u64 {
        table.set(&key(n), record(1, 0));
        assert!(n < 4_000 || table.memory_bytes() <= 64 * table.len(), "at {n}");
    }
}

#[test]
fn t_match_a_hole_ends_the_prefix() {
    let mut table = Table::new();
    for n in [1, 2, 3, 4, 5, 7] {
        table.set(&key(n), record(n as u32, 0));
    }
    let keys: Vec<u8> = (1..=8).flat_map(key).collect();
    assert_eq!(table.match_prefix(&keys, 16, 0, &TTL_S), (5, Stop::Absent));
    assert_eq!(table.match_prefix(&keys[..80], 16, 0, &TTL_S), (5, Stop::All));
    table.set(&key(2), Record::new(7, 2, 0, 0, 0, STATE_TOMBSTONE, 1, 0));
    assert_eq!(table.match_prefix(&keys, 16, 0, &TTL_S), (1, Stop::Evicted));
}

#[test]
fn t_gc_3_ends_of_life() {
    let agent = record(1, 0);
    assert!(!agent.is_expired(259_800, &TTL_S) && agent.is_expired(259_801, &TTL_S));
    let mut table = Table::new();
    table.set(&key(1), agent);
    assert_eq!(table.touch(&key(1), 16, 426, 2, 1024, 9).len(), LOG_ENTRY_BYTES);
    let chat = table.get(&key(1)).unwrap();
    assert!(!chat.is_expired(861_000, &TTL_S) && chat.is_expired(861_001, &TTL_S));
    assert!(table.touch(&key(1), 16, 426, 1, 1024, 9).is_empty());
}

#[test]
fn t_gc_2_leaves_go_before_parents() {
    let mut table = Table::new();
    for n in 1..=4 {
        table.set(&key(n), record(n as u32, 5));
    }
    table.touch(&[key(1), key(2)].concat(), 16, 6, 1, 1024, 0);
    let order: Vec<Key16> =
        table.eviction_order(0, &TTL_S, 9, false).into_iter().map(|(key, _)| key).collect();
    assert_eq!(order, [key(4), key(3), key(2), key(1)]);
    assert_eq!(table.eviction_order(0, &TTL_S, 2, false).len(), 2);
    assert!(table.eviction_order(0, &TTL_S, 9, true).is_empty());
}

#[test]
fn snapshots_and_logs_rebuild_the_table_and_damage_ends_them() {
    let mut table = Table::new();
    for n in 0..5_000 {
        table.set(&key(n), record(n as u32, 3));
    }
    let (mut copy, mut from, mut parts) = (Table::new(), Some(0), 0);
    while let Some(start) = from {
        let (log, next) = table.snapshot(start, 100, 42, 1024);
        assert_eq!(copy.apply_log(&log), (log.len(), 42));
        // Growth between two parts must not lose anything.
        for n in 0..50 {
            table.set(&key(1_000_000 + parts * 50 + n), record(1, 1));
        }
        (from, parts) = (next, parts + 1);
    }
    assert!(parts > 20);
    assert!((0..5_000).all(|n| copy.get(&key(n)) == table.get(&key(n))));

    let (log, _) = table.snapshot(0, usize::MAX, 1, 1024);
    for flip in [0, 8, 20, 40, 75, 79] {
        let mut bad = log[..3 * LOG_ENTRY_BYTES].to_vec();
        bad[LOG_ENTRY_BYTES + flip] ^= 1;
        assert_eq!(Table::new().apply_log(&bad).0, LOG_ENTRY_BYTES, "byte {flip}");
    }
    assert_eq!(Table::new().apply_log(&log[..LOG_ENTRY_BYTES * 2 - 1]).0, LOG_ENTRY_BYTES);
}

/// Many keys whose home is one line: most of them lie in lines behind it.
#[test]
fn a_prefix_of_keys_far_from_their_homes_ends_where_it_should() {
    let crowded = |n: u64| -> Key16 {
        let mut key = key(n);
        key[8..].copy_from_slice(&((n % 3) << 60 | n).to_le_bytes());
        key
    };
    let keys: Vec<Key16> = (0..150).map(crowded).collect();
    let mut table = Table::new();
    for (number, key) in keys.iter().enumerate() {
        table.set(key, record(number as u32, 5));
    }
    let flat = keys.concat();
    for ttl_s in [TTL_S, [0, 1 << 40, 1 << 40]] {
        let now_s = 6 * EPOCH_S + TTL_S[1] + 1;
        let expired = ttl_s == TTL_S;
        let end = if expired { (0, Stop::Evicted) } else { (150, Stop::All) };
        assert_eq!(table.match_prefix(&flat, 16, now_s, &ttl_s), end);
    }
    for gone in [149, 140, 100, 64, 63, 33, 32, 31, 1, 0] {
        table.remove(&keys[gone]);
        assert_eq!(table.match_prefix(&flat, 16, 0, &TTL_S), (gone, Stop::Absent));
        assert_eq!(table.match_prefix(&flat[..16 * gone], 16, 0, &TTL_S), (gone, Stop::All));
        table.set(&keys[gone], Record::new(7, 0, 0, 5, 0, STATE_TOMBSTONE, 1, 0));
        assert_eq!(table.match_prefix(&flat, 16, 0, &TTL_S), (gone, Stop::Evicted));
    }
}

#[test]
fn the_first_epoch_alive_is_the_one_that_is_not_expired() {
    for now_s in [0, 1, 599, 600, 601, 259_800, 259_801, 1_740_000_000] {
        for class in [0, 1, 2, 9] {
            for epoch in [0, 1, 2, 431, 432, 433, 2_900_000] {
                let ttl_s = TTL_S.get(class as usize).copied().unwrap_or(0);
                let block = Record::new(7, 1, 0, epoch, 0, STATE_COMMITTED, class, 0);
                let is_over = now_s > (epoch as u64 + 1) * EPOCH_S + ttl_s;
                assert_eq!(block.is_expired(now_s, &TTL_S), is_over, "{now_s} {class} {epoch}");
            }
        }
    }
}
