/// How the tools of a request are run.
public struct ToolPolicy: Sendable, Hashable {
    /// What happens to the error of a tool. That the task was cancelled is always thrown.
    public enum Failure: Sendable, Hashable {
        /// The model reads it as the result of the call, and may try again.
        case handToModel
        /// It ends the answer.
        case `throw`
    }

    /// What happens when the model has called tools often enough.
    public enum Limit: Sendable, Hashable {
        /// Another call throws ``MLXInferError/tooManyToolRounds(_:)``.
        case `throw`
        /// The model is asked for an answer without calls.
        case answer
    }

    /// The most answers with calls.
    public var maxRounds: Int
    public var onLimit: Limit
    /// Unknown tools and arguments that cannot be decoded are failures too.
    public var onFailure: Failure
    /// Whether the calls of one answer run at the same time; their results keep the calls' order.
    public var runsConcurrently: Bool

    public init(maxRounds: Int = 8, onLimit: Limit = .throw, onFailure: Failure = .handToModel, runsConcurrently: Bool = true) {
        (self.maxRounds, self.onLimit, self.onFailure) = (maxRounds, onLimit, onFailure)
        self.runsConcurrently = runsConcurrently
    }
}
