describe_nodes() {
    for node in $nodes; do
        eval "need=\$need_$node got=\$got_$node"
        json_nodes="$json_nodes${json_nodes:+, }{\"node\": $node, \"wanted\": $need, \"got\": $got}"
        [ "$got" -eq "$need" ] || say "node $node: $got of $need pages of $page_kib KiB"
    done
}

# mounted_here FOLDER: sets $fs_type to what is mounted on top there, and $fs_options.
mounted_here() {
    fs_type='' fs_options=''
    [ -r "$PROC/self/mountinfo" ] || return
    while read -r _ _ _ _ point rest; do
        [ "$point" = "$1" ] || continue
        rest=${rest##* - }
        fs_type=${rest%% *} fs_options=${rest##* }
    done << END
$(cat "$PROC/self/mountinfo")
END
}

is_ours() {
    mounted_here "$real"
    [ "$fs_type" = hugetlbfs ] || return 1
    case ",$fs_options," in
    *",pagesize=$((page_kib / 1024))M,"*) return 0 ;;
    esac
    return 1
}

mount_pages() {
    case $page_kib in
    2048) options=$OPTIONS_2MI ;;
    *) options=$OPTIONS_1GI ;;
    esac
    mkdir -p "$MEM" || return
    real=$(cd -P "$MEM" && pwd -P) # mountinfo shows no symbolic links
    is_ours && mounted=true && return
    if [ -n "$fs_type" ]; then
        why="$MEM has a mount of $fs_type already ($fs_options)" && return
    fi
    mount -t hugetlbfs -o "$options" "$SOURCE" "$MEM"
    is_ours && mounted=true && return
    why="mounting hugetlbfs at $MEM failed"
}

# Renamed into place: a reader sees the old result or the new one, never half of one. Not synced to
# a disk: what it says is true of this boot only.
write_result() {
    [ -n "$why" ] && say "$why"
    if { printf '%s\n' "{" \
        "  \"version\": 1," \
        "  \"pool\": \"$POOL\"," \
        "  \"boot_id\": \"$boot_id\"," \
        "  \"backing\": ${backing:+\"}${backing:-null}${backing:+\"}," \
        "  \"page_bytes\": $((page_kib * 1024))," \
        "  \"complete\": $complete," \
        "  \"mounted\": $mounted," \
        "  \"nodes\": [$json_nodes]," \
        "  \"passed_over\": [$json_passed]," \
        "  \"why\": \"$why\"" \
        "}" > "$RESULT.tmp"; } 2> /dev/null && mv -f "$RESULT.tmp" "$RESULT"; then
        say "result in $RESULT (complete: $complete, mounted: $mounted)"
    else
        say "cannot write $RESULT"
    fi
}

make_folder() {
    [ -h "$ROOT" ] && say "$ROOT is a symbolic link: nothing done" && return 1
    mkdir -p "$ROOT" && { [ -d "$STATE" ] || mkdir -m "$FOLDER_MODE" "$STATE"; }
}

main() {
    line "$PROC/sys/kernel/random/boot_id" || { say 'this boot has no id: nothing done' && return; }
    boot_id=$value
    make_folder || { say "cannot make $STATE: nothing done" && return; }
    if agent_holds "$STATE"; then
        say 'the agent holds this pool since this boot: nothing to do' && return
    fi
    if ! kernel_is_new_enough; then
        why='this kernel is older than Linux 5.14, which populating needs'
    elif ! find_nodes; then
        why='no NUMA node has both CPUs and memory that may be pinned'
    elif ! lay_out; then
        why='regions are asked for per GPU, and no GPU is on the PCI bus'
    elif ! find_size; then
        why="$wanted_kib KiB are asked for, and the machine has $machine_kib"
    else
        add_deferred
        find_reserve
        choose
        if [ "$page_kib" -gt 0 ]; then
            describe_nodes
            mount_pages
        fi
    fi
    write_result
}

# The trap ends this with 0. No exit here: scripts of several pools may stand in one file.
main
