#!/bin/sh
# Disks, modules and addresses of the testbed's node. One disk is containerd's store, another what
# this very cluster gave the node: copied once, so that a test's changes survive a reboot.
set -e
modprobe virtio_blk
mkdir -p /var/lib/containerd /run/config
mount LABEL=containerd /var/lib/containerd
mount -o ro LABEL=config /run/config
if [ ! -e /etc/kubernetes ]; then
    cp -r /run/config/kubernetes /etc/kubernetes.new
    sync
    mv /etc/kubernetes.new /etc/kubernetes
fi
modprobe -a virtio_net overlay bridge br_netfilter nf_conntrack nft_chain_nat
sysctl -q -w net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1
ip link set lo up
ip link set eth0 up
ip address add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2
# An address that pods can ask for names, whatever their network.
ip address add 169.254.20.10/32 dev lo
echo nameserver 10.0.2.3 > /etc/resolv.conf
# The network plugin asks for no masquerading: pods reach beyond the node under its own address.
nft add table ip testbed
nft add chain ip testbed out '{ type nat hook postrouting priority 100; }'
nft add rule ip testbed out ip saddr 10.244.0.0/16 oifname eth0 masquerade
