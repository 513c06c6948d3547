// Declarations of UniformTypeIdentifiers, and of what SwiftUI adds for them, as those of SwiftUI.
import Foundation
import SwiftUI

public struct UTType: Sendable, Hashable {
    public static let (image, text) = (UTType(), UTType())
}

extension View {
    public func fileImporter(
        isPresented: Binding<Bool>, allowedContentTypes: [UTType], allowsMultipleSelection: Bool,
        onCompletion: @escaping (Result<[URL], any Error>) -> Void
    ) -> some View { self }
}
