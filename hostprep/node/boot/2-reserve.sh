# agent_holds FOLDER: whether the agent has a record of this boot for the pool there.
agent_holds() {
    [ -r "$1/agent.json" ] || return 1
    case $(cat "$1/agent.json") in
    *"\"$boot_id\""*) return 0 ;;
    esac
    return 1
}

# Reads the next entry of a ledger (see write_ledger); $l_page is 0 for a line that is none.
read_entry() {
    read -r l_page l_node l_before l_spare l_need || return
    case $l_page:$l_node:$l_before:$l_spare:$l_need in
    *[!0-9:]* | :* | *: | *::*) l_page=0 ;;
    esac
}

# promised NODE: sets $value to the pages there that scripts of other pools counted on this boot.
promised() {
    promised_sum=0
    for other in "$ROOT"/*/boot.ledger; do
        [ -r "$other" ] && [ "$other" != "$LEDGER" ] || continue
        line "$other"
        [ "$value" = "$boot_id" ] && ! agent_holds "${other%/*}" || continue
        while read_entry; do
            [ "$l_page $l_node" = "$page_kib $1" ] && promised_sum=$((promised_sum + l_need))
        done < "$other"
    done
    value=$promised_sum
}

# persistent NODE: sets $value to the pages of the node's pool that are there for good.
persistent() {
    number "$NODES/node$1/hugepages/hugepages-${page_kib}kB/surplus_hugepages"
    surplus=$value
    number "$NODES/node$1/hugepages/hugepages-${page_kib}kB/nr_hugepages"
    value=$((value > surplus ? value - surplus : 0))
}

# in_group NODE: whether it is one of the nodes that get the same pages: one node alone, but for
# interleaved regions.
in_group() {
    case " $group " in
    *" $1 "*) return 0 ;;
    esac
    return 1
}

is_ledger_of_this_boot() {
    line "$LEDGER" && [ "$value" = "$boot_id" ]
}

# Sets $unreserved: free pages of the machine that nobody else has a claim on (mmap, no fault yet),
# less those that this pool counts on outside of the group.
find_unreserved() {
    number "$POOLS/hugepages-${page_kib}kB/resv_hugepages"
    reserved=$value
    number "$POOLS/hugepages-${page_kib}kB/free_hugepages"
    unreserved=$((value - reserved))
    if is_ledger_of_this_boot; then
        while read_entry; do
            [ "$l_page" = "$page_kib" ] && ! in_group "$l_node" &&
                unreserved=$((unreserved - l_spare))
        done < "$LEDGER"
    fi
    [ "$unreserved" -lt 0 ] && unreserved=0
}

# find_spare NODE NEED: sets $spare to the pages there already that the pool may use.
find_spare() {
    promised "$1"
    spare=$value
    number "$NODES/node$1/hugepages/hugepages-${page_kib}kB/free_hugepages"
    spare=$((value - surplus - spare))
    [ "$spare" -gt "$unreserved" ] && spare=$unreserved
    [ "$spare" -gt "$2" ] && spare=$2
    [ "$spare" -lt 0 ] && spare=0
    unreserved=$((unreserved - spare))
}

# Sets $settled to the page size that an earlier run of this boot settled on, empty for none.
find_settled() {
    settled=''
    is_ledger_of_this_boot || return
    while read_entry; do
        [ "$l_page" = 0 ] || ! in_group "$l_node" || settled=$l_page
    done < "$LEDGER"
    case "$settled $BACKINGS " in
    '1048576 '*HugeTLB1Gi* | '2048 '*HugeTLB2Mi*) return ;;
    '1048576 '* | '2048 '*) page_kib=$settled && give_back ;; # no longer asked for
    esac
    settled=''
}

# Forgets, then takes from the ledger what an earlier run of this boot wrote before it began.
read_ledger() {
    for node in $group; do eval "before_$node='' spare_$node=''"; done
    [ "$settled" = "$page_kib" ] || return
    while read_entry; do
        [ "$l_page" = "$page_kib" ] && in_group "$l_node" || continue
        eval "before_$l_node=\$l_before spare_$l_node=\$l_spare"
    done < "$LEDGER"
}

# Written ahead of any change, so that a run after a kill knows what was added and what was not.
# First line: the boot. Then for each node: page size in KiB, node, pages that were there before,
# those of them that the pool may use, pages that the pool needs.
write_ledger() {
    others=$(other_entries)
    {
        printf '%s\n' "$boot_id" ${others:+"$others"}
        for node in $group; do
            eval "l_before=\$before_$node l_spare=\$spare_$node l_need=\$need_$node"
            printf '%s %s %s %s %s\n' "$page_kib" "$node" "$l_before" "$l_spare" "$l_need"
        done
    } > "$LEDGER.tmp" 2> /dev/null && mv -f "$LEDGER.tmp" "$LEDGER" && settled=$page_kib
}

# Prints the ledger's entries of nodes outside of the group.
other_entries() {
    is_ledger_of_this_boot || return
    while read_entry; do
        [ "$l_page" = 0 ] || in_group "$l_node" ||
            printf '%s %s %s %s %s\n' "$l_page" "$l_node" "$l_before" "$l_spare" "$l_need"
    done < "$LEDGER"
}

# Takes back what the ledger says was added for the group, and no more: pages of others stay.
give_back() {
    while read_entry; do
        [ "$l_page" = "$page_kib" ] && in_group "$l_node" || continue
        persistent "$l_node"
        added=$((value - l_before)) most=$((l_need - l_spare))
        [ "$added" -gt "$most" ] && added=$most
        [ "$added" -gt 0 ] && write_pages "$l_node" $((value - added))
    done < "$LEDGER"
    others=$(other_entries)
    if [ -z "$others" ]; then
        rm -f "$LEDGER"
    else
        { printf '%s\n' "$boot_id" "$others" > "$LEDGER.tmp"; } 2> /dev/null &&
            mv -f "$LEDGER.tmp" "$LEDGER"
    fi
    settled=''
}

# write_pages NODE PAGES: asks for a pool of that size; only reading back tells what came of it.
write_pages() {
    { printf '%s\n' "$2" \
        > "$NODES/node$1/hugepages/hugepages-${page_kib}kB/nr_hugepages"; } 2> /dev/null
}

# plan_node NODE: sets need_, before_, spare_ and target_NODE; fails with $why if it must not be.
plan_node() {
    if [ ! -d "$NODES/node$1/hugepages/hugepages-${page_kib}kB" ]; then
        why="node $1 offers no pages of $page_kib KiB" && return 1
    fi
    eval "regions=\$regions_$1 before=\$before_$1 spare=\$spare_$1 movable=\$movable_$1" \
        "total_mib=\$total_mib_$1 free_mib=\$free_mib_$1"
    need=$((regions * share + interleaved * ((share + node_count - 1) / node_count)))
    persistent "$1"
    now=$value
    [ -n "$before" ] || { before=$now && find_spare "$1" "$need"; }
    target=$((before + (need > spare ? need - spare : 0)))
    add_mib=$((target > now ? (target - now) * page_kib / 1024 : 0))
    if [ "$add_mib" -gt 0 ] && [ -n "$movable" ] && [ "$page_kib" -lt 1048576 ]; then
        why="node $1 has a ZONE_MOVABLE, from which such pages come first" && return 1
    fi
    keep_mib=$((reserve_mib * total_mib / nodes_mib))
    [ "$keep_mib" -lt $((total_mib / 256)) ] && keep_mib=$((total_mib / 256))
    if [ $((add_mib + keep_mib)) -gt "$free_mib" ] && [ "$add_mib" -gt 0 ]; then
        why="node $1 has $free_mib MiB free, must keep $keep_mib, and $add_mib would be added"
        return 1
    fi
    eval "need_$1=$need before_$1=$before spare_$1=$spare target_$1=$target"
}

# add_pages NODE: raises the node's pool to its target if it is below; reads got_NODE back.
add_pages() {
    eval "need=\$need_$1 target=\$target_$1"
    persistent "$1"
    if [ "$value" -lt "$target" ]; then
        write_pages "$1" "$target"
        persistent "$1"
    fi
    got=$((value < target ? need - (target - value) : need))
    [ "$got" -lt 0 ] && got=0
    eval "got_$1=$got"
    [ "$got" -eq "$need" ] && return
    complete=false
    why="node $1 gave $got of $need pages of $page_kib KiB"
}

# reserve KIB: has the pool's pages of that size; fails with $why where none is to be added.
reserve() {
    page_kib=$1 complete=false why=''
    if [ -n "$settled" ] && [ "$settled" != "$page_kib" ]; then
        why='passed over earlier in this boot' && return 1
    fi
    share=$((wanted_kib / region_count / page_kib))
    if [ "$share" -eq 0 ]; then
        why="a region would be smaller than one page of $page_kib KiB" && return 1
    fi
    read_ledger
    find_unreserved
    for node in $group; do plan_node "$node" || return 1; done
    write_ledger || { why="cannot write $LEDGER" && return 1; }
    complete=true
    for node in $group; do
        eval "got_$node=0"
        [ -z "$stopped" ] && add_pages "$node"
    done
    [ -n "$stopped" ] && complete=false why='stopped before it was done'
    return 0
}

# Told once where the reason is the same on all nodes.
pass_over() {
    passed="{\"backing\": \"$1\", \"why\": \"$why\"}"
    case $json_passed in
    *"$passed"*) return ;;
    esac
    say "$1 passed over: $why"
    json_passed="$json_passed${json_passed:+, }$passed"
}

# Takes the first of the pool's backings that the group can have; sets $backing, empty for none.
choose() {
    backing=''
    find_settled
    left=$BACKINGS
    while [ -n "$left" ]; do
        name=${left%% *}
        left=${left#"$name"} left=${left# }
        case $name in
        HugeTLB1Gi) reserve 1048576 ;;
        HugeTLB2Mi) reserve 2048 ;;
        # Of tmpfs nothing has to be done before kubelet.
        *) page_kib=0 complete=true backing=$name why='' && return ;;
        esac || {
            pass_over "$name"
            [ "$settled" = "$page_kib" ] && give_back # a part that a killed run left
            continue
        }
        # A part is worth keeping only for a pool that can be had in no other way.
        if [ "$complete" = true ] || [ -z "$left" ] || [ -n "$stopped" ]; then
            backing=$name && return
        fi
        pass_over "$name"
        give_back
    done
    page_kib=0 complete=false
}


# Chooses for each node alone, or for all at once where a region is interleaved over them. Sets
# $taken to the backings in use, pages_KIB to the pages of all regions, $all_complete and $all_why.
choose_by_node() {
    taken='' all_complete=true all_why='' pages_2048=0 pages_1048576=0
    if [ "$interleaved" -gt 0 ]; then
        group=${nodes# }
        choose
        note_choice
        return
    fi
    for group in $nodes; do
        choose
        note_choice
    done
}

note_choice() {
    [ "$complete" = true ] || all_complete=false
    case "; $all_why; " in
    *"; $why; "*) ;; # told already
    *) all_why="$all_why${all_why:+${why:+; }}$why" ;;
    esac
    case " $taken " in
    *" $backing "*) ;;
    *) taken="$taken $backing" ;;
    esac
    [ "$page_kib" -gt 0 ] || return
    for node in $group; do
        eval "need=\$need_$node got=\$got_$node"
        json_nodes="$json_nodes${json_nodes:+, }{\"node\": $node, \"backing\": \"$backing\","
        json_nodes="$json_nodes \"wanted\": $need, \"got\": $got}"
        [ "$got" -eq "$need" ] || say "node $node: $got of $need pages of $page_kib KiB"
        eval "pages_$page_kib=\$((pages_$page_kib + regions_$node * share))"
    done
    eval "pages_$page_kib=\$((pages_$page_kib + interleaved * share))"
}
