/// Why bytes are not a complete HTTP response.
enum HTTPFailure: Error, Equatable {
    /// They break the grammar, or a limit.
    case malformed(String)
    /// They stop in the middle.
    case truncated(String)
}
