import Foundation

/// Everything that can go wrong between an app and the server, with what the server said about it.
public enum MLXInferError: Error, Sendable, Equatable {
    /// A Unix socket's path has more bytes than the system allows in an address: 103 on macOS, 107 on Linux.
    case socketPathTooLong(path: String, limit: Int)
    /// Nothing listens at this path, or at this host and port.
    case serverNotRunning(String)
    /// The socket exists, and this user may not connect to it.
    case permissionDenied(String)
    /// The connection could not be made for another reason.
    case connectionFailed(String)
    /// The request cannot be sent as it is; nothing was sent.
    case invalidRequest(String)
    /// What came back is not what this protocol allows, so that it may not be the right server.
    case protocolViolation(String)
    /// The server refused the request or gave it up, and says why.
    case api(APIError)
    /// The connection broke before the answer was complete; `partial` is the text received until then.
    case streamInterrupted(partial: String, reason: String)
    /// Nothing happened for longer than ``Timeouts`` allow; `partial` is the text received until then.
    case timedOut(Waiting, partial: String)
    /// The answer is complete, and is not what it was asked to be, for instance not JSON of the type expected.
    case undecodableAnswer(text: String, reason: String)
    /// The model called tools in more answers than ``ToolPolicy/maxRounds`` allows.
    case tooManyToolRounds(Int)
    /// A program that was to run or to install a server could not be started, or has ended; `lastWords` is the end of what it wrote.
    case serverEnded(reason: String, lastWords: String)
    /// The task was cancelled; the server has been told by closing the connection. Only where errors have one type: elsewhere it is
    /// `CancellationError`.
    case cancelled
    /// An error that is not of this package, in its own words: where work of the app's failed in ``Client/typed(isolation:_:)``.
    case other(String)

    /// What was being waited for when the time was up.
    public enum Waiting: String, Sendable, Equatable {
        case connection
        case sending
        case answer
        case wholeAnswer = "whole answer"
    }
}

extension MLXInferError: LocalizedError, CustomStringConvertible {
    /// One line for people: what is wrong, and what to do where that is known.
    public var description: String {
        switch self {
        case .socketPathTooLong(let path, let limit):
            "the socket's path has \(path.utf8.count) bytes, the system allows \(limit); choose a shorter one: \(path)"
        case .serverNotRunning(let place): "no server answers at \(place); start it with: mlxinfer serve MODEL"
        case .permissionDenied(let place): "this user may not connect to \(place)"
        case .connectionFailed(let reason): "the connection failed: \(reason)"
        case .invalidRequest(let reason): "the request cannot be sent: \(reason)"
        case .protocolViolation(let reason): "the answer is not HTTP as the server speaks it: \(reason)"
        case .api(let error): error.description
        case .streamInterrupted(_, let reason): "the answer broke off: \(reason)"
        case .timedOut(let waiting, _): "the time for the \(waiting.rawValue) is up"
        case .undecodableAnswer(_, let reason): "the answer is not what was asked for: \(reason)"
        case .tooManyToolRounds(let count): "the model called tools \(count) times, and once more"
        case .serverEnded(let reason, let lastWords): lastWords.isEmpty ? reason : "\(reason): \(lastWords)"
        case .cancelled: "cancelled"
        case .other(let reason): reason
        }
    }

    /// The same, of the server's errors only the sentence for people.
    public var errorDescription: String? { if case .api(let error) = self { error.message } else { description } }
}

extension MLXInferError {
    /// Any error as one of this type: `CancellationError` as ``cancelled``, one that is not of this package as ``other(_:)``.
    public init(_ error: any Error) {
        switch error {
        case let error as MLXInferError: self = error
        case is CancellationError: self = .cancelled
        default: self = .other("\(error)")
        }
    }

    /// Whether the conversation and its answer are longer than the model's context, or than the server has room for.
    public var isTooLong: Bool { if case .api(let error) = self { error.isTooLong } else { false } }

    /// What a call whose errors are of any type throws: ``cancelled`` as Swift's own `CancellationError`.
    static func untyped(_ error: any Error) -> any Error { error as? MLXInferError == .cancelled ? CancellationError() : error }
}
