import Foundation

/// Where a server listens.
public struct Endpoint: Sendable, Hashable {
    enum Kind: Sendable, Hashable {
        case unix(path: String)
        case tcp(host: String, port: UInt16)
    }

    let kind: Kind
    let apiKey: String?

    /// A Unix socket; `~` at the front of its path is the user's folder.
    ///
    /// An app in the sandbox can reach only sockets in the container of its app group, whose path must stay under 104 bytes.
    public static func unix(path: String) -> Endpoint {
        Endpoint(kind: .unix(path: (path as NSString).expandingTildeInPath), apiKey: nil)
    }

    /// A host and port, with the key that the server was started with, if any.
    ///
    /// The connection is not encrypted: use it on this machine, or through a tunnel.
    public static func tcp(host: String = "127.0.0.1", port: UInt16 = 8080, apiKey: String? = nil) -> Endpoint {
        Endpoint(kind: .tcp(host: host, port: port), apiKey: apiKey)
    }

    /// The socket that `mlxinfer serve` binds where it is told nothing else; the variable `MLXINFER_SOCKET` moves it.
    public static var `default`: Endpoint {
        .unix(path: ProcessInfo.processInfo.environment["MLXINFER_SOCKET"] ?? "~/.mlxinfer/api.sock")
    }

    /// The value of the `Host` header.
    var hostHeader: String {
        switch kind {
        case .unix: "localhost"
        case .tcp(let host, let port): host.contains(":") ? "[\(host)]:\(port)" : "\(host):\(port)"
        }
    }
}

extension Endpoint: CustomStringConvertible {
    /// The path, or the host and port; never the key.
    public var description: String {
        if case .unix(let path) = kind { path } else { hostHeader }
    }
}
